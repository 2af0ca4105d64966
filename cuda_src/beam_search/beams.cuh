// The most beams of a batch entry: one thread or one entry of shared memory each.
#pragma once

constexpr int MAX_BEAMS = 64;
