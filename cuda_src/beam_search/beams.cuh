// A batch entry has at most MAX_BEAMS beams. A kernel gives each beam one thread, or one element of an array in shared
// memory.
#pragma once

constexpr int MAX_BEAMS = 64;
