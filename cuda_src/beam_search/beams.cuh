// Maximum beams per batch entry. A beam takes one thread or one entry of shared memory.
#pragma once

constexpr int MAX_BEAMS = 64;
