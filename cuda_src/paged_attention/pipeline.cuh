// The pipeline of a team: it looks up the cache blocks of a piece's tiles and copies the tiles into the stages.
#pragma once
#include "common/mma.cuh"
#include "paged_attention/masks.cuh"
#include "paged_attention/team.cuh"

template <typename F> struct Pipeline {
    Segment segment;
    const int* table;
    int tiles; // number of tiles of this team
    // Block table entries for the team's next 64 tiles, one per lane in each of the two registers. `next_entry` is
    // loaded 32 tiles ahead of its use.
    int entry, next_entry;
    bool bad; // a table entry is not a block of the cache, or the sequence is longer than its table

    // Return `id`, the table entry for the team's tile k. If the entry is invalid, set `bad` and return 0. Entries for
    // tiles before the window of every row are not checked.
    __device__ __forceinline__ int checked(const Params& p, const Team<F>& team, int k, int id) {
        if (k >= tiles || team.token(segment, k) + TILE <= segment.low || unsigned(id) < unsigned(p.blocks)) return id;
        bad = true;
        return 0;
    }

    __device__ __forceinline__ int entry_of(const Params& p, const Team<F>& team, int k) {
        return k < tiles ? checked(p, team, k, table[team.token(segment, k) / team.block_size]) : 0;
    }

    // Look up the first 64 tiles of `segment`. If `known` is true, `first_entry` is the table entry of the team's tile
    // with the index `lane`.
    __device__ __forceinline__ void look_up(const Params& p, const Team<F>& team, bool known, int first_entry) {
        tiles = team.share(ceil_div(segment.end - segment.begin, TILE));
        bad = !segment.whole;
        entry = known ? checked(p, team, team.lane, first_entry) : entry_of(p, team, team.lane);
        next_entry = entry_of(p, team, 32 + team.lane);
    }

    // Return whether any row of the piece attends to a token of tile k.
    __device__ __forceinline__ bool wanted(const Params& p, const Team<F>& team, int k) const {
        const int token = team.token(segment, k);
        bool wanted = k < tiles && token + TILE > segment.low;
        if constexpr (F::EXTRAS && F::TEAM == 1)
            if (p.sparse_stride) wanted = wanted && __any_sync(FULL_WARP, seen<F>(p, team, segment, token));
        return wanted;
    }

    // Start to copy tile k into its stage, as one cp.async commit group. If no row attends to the tile, the group is
    // empty, because the tile's cache block may have been freed.
    __device__ __forceinline__ void start_copies(const Params& p, const Team<F>& team, int k) {
        if (k % 32 == 0 && k > 0) {
            entry = next_entry;
            next_entry = entry_of(p, team, k + 32 + team.lane);
        }
        const long long id = __shfl_sync(FULL_WARP, entry, k % 32);
        const int token = team.token(segment, k);
        if (wanted(p, team, k)) F::Tile::template start_copies<F>(p, team, id, segment.kv_head, token, k);
        cp_async_commit_group();
    }

    // Start to copy the first STAGES - 1 tiles.
    __device__ __forceinline__ void start(const Params& p, const Team<F>& team) {
#pragma unroll
        for (int k = 0; k < F::STAGES - 1; ++k) start_copies(p, team, k);
    }
};
