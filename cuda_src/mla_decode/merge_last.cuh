// The end of a kernel that attends and merges in one launch: all blocks of the grid meet when they have left their partial
// results, then each puts together its share of the rows of the last sequence that its part visited. The bits are those of
// combine_parts with the same TEAM.
//
// A cooperative launch keeps all blocks on the GPU at once, so that they can wait for each other, and gives the grid a word in
// memory to do so. (PTX calls the registers with its address envreg1 and envreg2; cooperative_groups.h uses them so, and the
// barrier below is its barrier.)
#pragma once
#include "mla_decode/combine_rows.cuh"

constexpr int MERGE_BARRIER = 5;   // a numbered barrier that no kernel that attends uses else
constexpr int MERGE_THREADS = 256; // the first of a block

__device__ __forceinline__ void merge_barrier() {
    asm volatile("bar.sync %0, %1;" ::"n"(MERGE_BARRIER), "n"(MERGE_THREADS) : "memory");
}

// Bring what the first visit looks up, one after the other, to the L2 cache at once; each block of the grid a few lines. For a warp.
__device__ __forceinline__ void prefetch_places(const Params& p) {
    if (!p.block_table) return;
    constexpr int LINE = 128 / sizeof(int), OTHERS = 2;
    const int lane = threadIdx.x % 32;
    const long long block = ((long long)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const long long table = (p.batch - 1) * p.table_stride + p.max_pages;
    const int* const from = lane == 0 ? p.lengths : lane == 1 ? p.splits : p.block_table;
    const long long at = (lane < OTHERS ? block : block * (32 - OTHERS) + lane - OTHERS) * LINE;
    if (at < (lane < OTHERS ? p.batch : table)) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at) : "memory");
}

// Wait until the first MERGE_THREADS threads of all blocks are here, and see what they have stored. The upper bit of the word
// flips when all have come, since the additions of all blocks sum up to it.
__device__ __forceinline__ void meet_all_blocks() {
    merge_barrier();
    if (threadIdx.x == 0) {
        unsigned high, low, before, now;
        asm("mov.u32 %0, %%envreg1;" : "=r"(high));
        asm("mov.u32 %0, %%envreg2;" : "=r"(low));
        const unsigned long long word = ((unsigned long long)high << 32 | low) + 4; // behind the size of the workspace
        const bool first = blockIdx.x + blockIdx.y + blockIdx.z == 0;
        const unsigned one = first ? 0x80000000u - (gridDim.x * gridDim.y * gridDim.z - 1) : 1u;
        asm volatile("atom.add.release.gpu.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(one) : "memory");
        do asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
        while (!((before ^ now) & 0x80000000u));
    }
    merge_barrier();
}

// What a block puts together: units of EACH * 128 columns of a row, of the last sequence of its part.
template <int EACH> struct MergeShare {
    static constexpr int UNITS = 4 / EACH; // of a row of 512 columns
    int sequence, count, first_row, begin, end;
    long long first; // slot of the first visit's results

    // Of `rows` rows from `first_row` on, which are those of blockIdx.x. All numbers of a plan may be the caller's.
    __device__ __forceinline__ MergeShare(const Params& p, int first_row, int rows) : first_row(first_row) {
        begin = end = 0;
        const Part part(p, blockIdx.z);
        sequence = part.last;
        if (part.first > part.last) return;
        const int before = p.splits[sequence], splits = p.splits[sequence + 1] - before;
        if (splits <= 1) return;
        first = min(max(2 * ((long long)before - sequence), 0ll), 2ll * p.parts - 1);
        count = int(min((long long)splits, 2ll * p.parts - first));
        // The part of the last visit takes a share unless it goes on with another sequence.
        const int visit = part.first == sequence ? part.split : 0;
        const long long last = blockIdx.z + (long long)splits - 1 - visit;
        const bool stays = last >= 0 && last < p.parts && p.metadata[last * 8 + 2] == sequence;
        const int shares = stays ? splits : splits - 1;
        if (visit < 0 || visit >= shares) return;
        const long long units = min(rows, p.rows() - first_row) * UNITS;
        begin = int(units * visit / shares), end = int(units * (visit + 1) / shares);
    }
};

// Put together the units from `unit` on: AT_ONCE of them, or with TEAM == 1 that many for each warp; BATCH visits of each are on
// their way before the weights are known. `found` has room for AT_ONCE * 8 * EACH * 32 numbers if TEAM == 8.
template <typename T, int TEAM, int EACH, int AT_ONCE, int BATCH>
__device__ __forceinline__ void merge_units(const Params& p, const MergeShare<EACH>& share, int unit, float4* found) {
    constexpr int WARPS = MERGE_THREADS / 32, DIM_V = 512, FOURS = DIM_V / 4, UNITS = MergeShare<EACH>::UNITS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, member = TEAM == 1 ? 0 : warp;
    const int rows = p.rows(), kv_head = blockIdx.y;
    const long long step = (long long)p.kv_heads * rows; // rows between visits
    auto own = [&](int g) { return unit + (TEAM == 1 ? warp + WARPS * g : g); };
    auto row_of = [&](int g) { return share.first_row + own(g) / UNITS; };
    auto first_four = [&](int g) { return own(g) % UNITS * (EACH * 32) + lane; };
    auto partials = [&](int g) {
        const long long at = share.first * step + (long long)kv_head * rows + row_of(g);
        return Partials{p.partial_lse + at, reinterpret_cast<const float4*>(p.partial_out + at * DIM_V), step,
                        own(g) < share.end ? share.count : 0, FOURS};
    };
    float4 values[AT_ONCE][BATCH][EACH];
    float lses[AT_ONCE], largest[AT_ONCE], sum[AT_ONCE];
#pragma unroll
    for (int g = 0; g < AT_ONCE; ++g) {
        const Partials row = partials(g);
        load_batch<DIM_V, TEAM>(values[g], row, member, first_four(g));
        lses[g] = lane < row.count ? row.lses[lane * step] : -CUDART_INF_F;
    }
    const Visit visit(p, share.sequence);
#pragma unroll
    for (int g = 0; g < AT_ONCE; ++g) {
        const Partials row = partials(g);
        largest[g] = lses[g];
        for (int split = lane + 32; split < row.count; split += 32)
            largest[g] = fmaxf(largest[g], row.lses[split * step]);
        largest[g] = lanes_max<32>(largest[g]);
        auto weight = [&](float lse) { return lse == -CUDART_INF_F ? 0.f : exp2f(lse - largest[g]); };
        sum[g] = weight(lses[g]);
        for (int split = lane + 32; split < row.count; split += 32) sum[g] += weight(row.lses[split * step]);
        sum[g] = lanes_sum<32>(sum[g]);

        float4 total[EACH] = {};
        add_batch<TEAM>(total, values[g], row, member, largest[g]);
        for (int split = member + BATCH * TEAM; split < row.count; split += BATCH * TEAM) {
            load_batch<DIM_V, TEAM>(values[g], row, split, first_four(g));
            add_batch<TEAM>(total, values[g], row, split, largest[g]);
        }
        if constexpr (TEAM == 1) {
            if (row.count > 0)
                write_row<T>(p, visit, kv_head, row_of(g), total, largest[g], sum[g], first_four(g), FOURS);
        } else {
#pragma unroll
            for (int i = 0; i < EACH; ++i) found[(g * WARPS + warp) * (EACH * 32) + i * 32 + lane] = total[i];
        }
    }
    if constexpr (TEAM == WARPS) {
        merge_barrier();
#pragma unroll
        for (int g = 0; g < AT_ONCE; ++g) {
            if (warp != g || own(g) >= share.end) continue;
            const auto& of_all = reinterpret_cast<const float4(*)[WARPS][EACH * 32]>(found)[g];
            float4 total[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i) total[i] = of_all[0][i * 32 + lane];
            add_others<TEAM>(total, of_all, lane);
            write_row<T>(p, visit, kv_head, row_of(g), total, largest[g], sum[g], first_four(g), FOURS);
        }
        merge_barrier();
    }
}

// Meet the other blocks, then put together this block's share. ROWS: of a block. `found` is shared memory that nobody uses any
// more: 4 * 8 * EACH * 32 float4 if TEAM == 8.
template <typename T, int TEAM, int EACH, int ROWS>
__device__ __forceinline__ void merge_last(const Params& p, float4* found) {
    const MergeShare<EACH> share(p, blockIdx.x * ROWS, ROWS);
    meet_all_blocks();
    constexpr int AT_ONCE = 4, STEP = TEAM == 1 ? AT_ONCE * MERGE_THREADS / 32 : AT_ONCE;
    if (TEAM > 1 && share.end - share.begin == 1) {
        merge_units<T, TEAM, EACH, 1, EACH == 1 ? 16 : 8>(p, share, share.begin, found);
    } else {
        for (int unit = share.begin; unit < share.end; unit += STEP)
            merge_units<T, TEAM, EACH, AT_ONCE, EACH == 1 ? 6 : 2>(p, share, unit, found);
    }
}
