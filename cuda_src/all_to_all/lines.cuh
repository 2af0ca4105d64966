// A line, as in NCCL's LL128 protocol, is 112 bytes of data, and 16 bytes that repeat the epoch (the number of the
// call).
//
// Eight neighbouring lanes store a line with one instruction, and NVLink delivers it as a whole, so a reader that sees
// the epoch also sees the data. Flags would need a release, which waits for a round trip to the peer.
#pragma once
#include "all_to_all/window.cuh"

constexpr int LANES_PER_LINE = 8, LINE_VECTORS = 7, LINE_BYTES = 128;

// The last of eight lanes stores the epoch instead of a vector.
__device__ __forceinline__ void store_line(char* line, uint4 vector, unsigned epoch) {
    const int lane = threadIdx.x % LANES_PER_LINE;
    if (lane == LINE_VECTORS) vector = make_uint4(epoch, epoch, epoch, epoch);
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(line + lane * 16), "r"(vector.x),
                 "r"(vector.y), "r"(vector.z), "r"(vector.w)
                 : "memory");
}

// The last of eight lanes returns whether the line has arrived, the others return true.
__device__ __forceinline__ bool load_line(uint4& vector, const char* line, unsigned epoch) {
    const int lane = threadIdx.x % LANES_PER_LINE;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w)
                 : "l"(line + lane * 16)
                 : "memory");
    return lane != LINE_VECTORS || (vector.x == epoch && vector.y == epoch && vector.z == epoch && vector.w == epoch);
}
