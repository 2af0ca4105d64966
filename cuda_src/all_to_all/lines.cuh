// Lines of NCCL's protocol LL128: 128 bytes, with 112 bytes of data and the epoch repeated in the last 16 bytes.
//
// Over NVLink, a line that eight neighbouring lanes store with one instruction arrives as a whole. A reader that sees
// the epoch therefore sees the data. So a line needs no release, which would wait for a round trip to the peer, and no
// flag. This does not hold over PCIe.
#pragma once
#include "all_to_all/window.cuh"

constexpr int LANES_OF_LINE = 8, UNITS_OF_LINE = 7, LINE_BYTES = 128;

// Store a lane's unit into its line. The last lane of the line stores the epoch instead.
__device__ __forceinline__ void store_line(char* line, uint4 unit, unsigned epoch) {
    const int lane = threadIdx.x % LANES_OF_LINE;
    if (lane == UNITS_OF_LINE) unit = make_uint4(epoch, epoch, epoch, epoch);
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(line + lane * 16), "r"(unit.x), "r"(unit.y),
                 "r"(unit.z), "r"(unit.w)
                 : "memory");
}

// Load a lane's unit. In the last lane of a line, return whether the line has arrived; in the others, true.
__device__ __forceinline__ bool load_line(uint4& unit, const char* line, unsigned epoch) {
    const int lane = threadIdx.x % LANES_OF_LINE;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(unit.x), "=r"(unit.y), "=r"(unit.z), "=r"(unit.w)
                 : "l"(line + lane * 16)
                 : "memory");
    return lane != UNITS_OF_LINE || (unit.x == epoch && unit.y == epoch && unit.z == epoch && unit.w == epoch);
}
