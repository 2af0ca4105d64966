// Maximum number of beams per batch entry. Each beam takes one thread, or one element of an array in shared memory.
#pragma once

constexpr int MAX_BEAMS = 64;
