// Look up the cache blocks of a split's tiles, and copy the tiles into the stages of a team.
#pragma once
#include "common/mma.cuh"
#include "paged_attention/masks.cuh"
#include "paged_attention/team.cuh"

template <typename F> struct Pipeline {
    KvSplit kv_split;
    const int* table;
    int tiles; // of this team
    // Table entries of the team's next 64 tiles: 32 in each variable, one per lane. `next_entry` is loaded 32 tiles
    // ahead.
    int entry, next_entry;
    bool bad; // an entry is not a block of the cache, or the sequence is longer than its table

    // Return the table entry of tile k. If it is invalid, set `bad` and return 0. An entry is not checked if its tile
    // is before the windows of all rows.
    __device__ __forceinline__ int checked(const Params& p, const Team<F>& team, int k, int id) {
        if (k >= tiles || team.token(kv_split, k) + TILE <= kv_split.low || unsigned(id) < unsigned(p.blocks))
            return id;
        bad = true;
        return 0;
    }

    __device__ __forceinline__ int entry_of(const Params& p, const Team<F>& team, int k) {
        return k < tiles ? checked(p, team, k, table[team.token(kv_split, k) / team.block_size]) : 0;
    }

    // If `known`, `first_entry` is the table entry of the team's tile number `lane`.
    __device__ __forceinline__ void look_up(const Params& p, const Team<F>& team, bool known, int first_entry) {
        tiles = team.count_tiles(ceil_div(kv_split.end - kv_split.begin, TILE));
        bad = !kv_split.covered;
        entry = known ? checked(p, team, team.lane, first_entry) : entry_of(p, team, team.lane);
        next_entry = entry_of(p, team, 32 + team.lane);
    }

    __device__ __forceinline__ bool wanted(const Params& p, const Team<F>& team, int k) const {
        const int token = team.token(kv_split, k);
        bool wanted = k < tiles && token + TILE > kv_split.low;
        if constexpr (F::EXTRAS && F::TEAM == 1)
            if (p.sparse_stride) wanted = wanted && __any_sync(FULL_WARP, seen<F>(p, team, kv_split, token));
        return wanted;
    }

    // Copy tile k as one commit group. If no row attends to the tile, the group is empty, because its cache block may
    // have been freed.
    __device__ __forceinline__ void start_copies(const Params& p, const Team<F>& team, int k) {
        if (k % 32 == 0 && k > 0) {
            entry = next_entry;
            next_entry = entry_of(p, team, k + 32 + team.lane);
        }
        const long long id = __shfl_sync(FULL_WARP, entry, k % 32);
        const int token = team.token(kv_split, k);
        if (wanted(p, team, k)) F::Tile::template start_copies<F>(p, team, id, kv_split.kv_head, token, k);
        cp_async_commit_group();
    }

    __device__ __forceinline__ void start(const Params& p, const Team<F>& team) {
#pragma unroll
        for (int k = 0; k < F::STAGES - 1; ++k) start_copies(p, team, k);
    }
};
