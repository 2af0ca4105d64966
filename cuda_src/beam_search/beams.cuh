// Maximum number of beams per batch entry. The kernels use one thread, or one entry of an array in shared memory, per
// beam.
#pragma once

constexpr int MAX_BEAMS = 64;
