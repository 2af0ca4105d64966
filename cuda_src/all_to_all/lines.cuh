// Store and load lines, as in NCCL's LL128 protocol. A line is 128 bytes: 112 bytes of data, and then the epoch (the
// number of the call), repeated in the last 16 bytes.
//
// Eight neighbouring lanes store a line with one instruction, and NVLink delivers the line as a whole. A reader that
// sees the epoch therefore also sees the data. So a line needs no flag, and no release, which would wait for a round
// trip to the peer. PCIe does not guarantee that a line arrives as a whole.
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

// Load a lane's unit of a line. In the last of the eight lanes, return whether the line has arrived; in the other
// lanes, return true.
__device__ __forceinline__ bool load_line(uint4& unit, const char* line, unsigned epoch) {
    const int lane = threadIdx.x % LANES_OF_LINE;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(unit.x), "=r"(unit.y), "=r"(unit.z), "=r"(unit.w)
                 : "l"(line + lane * 16)
                 : "memory");
    return lane != UNITS_OF_LINE || (unit.x == epoch && unit.y == epoch && unit.z == epoch && unit.w == epoch);
}
