// Divide a block into teams of warps that share tiles, and locate a thread in its team.
#pragma once
#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "paged_attention/pieces.cuh"

constexpr int TILE = 16; // tokens

// The stages of all teams, with tiles of keys and values. The results of a split overwrite the last stage.
extern __shared__ __align__(128) char shared[];

// A team has F::TEAM warps. It takes every `step()`-th tile of a split, and each of its warps processes F::Rows::ROWS
// of the rows.
template <typename F> struct Team {
    static constexpr int LANES = 32 * F::TEAM;

    const int head_dim, block_size, chunks; // `chunks`: of 16 bytes, per token
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int index = warp / F::TEAM, member = warp % F::TEAM, lane_of_team = member * 32 + lane;
    const int pair = lane % 4;                // column pair in the fragments of common/mma.cuh
    bool in_cluster = F::SCHEDULING != QUEUE; // the blocks of a cluster share a split's tiles
    int first_tile = cluster_rank<F::CLUSTER>() * F::TEAMS + index;

    __device__ __forceinline__ explicit Team(const Params& p)
        : head_dim(F::HEAD_DIM ? F::HEAD_DIM : p.head_dim), block_size(F::BLOCK_SIZE ? F::BLOCK_SIZE : p.block_size),
          chunks(head_dim / F::Tile::CHUNK) {}

    __device__ __forceinline__ void leave_cluster() { in_cluster = false, first_tile = index; }

    __device__ __forceinline__ int step() const { return F::SCHEDULING == EITHER && !in_cluster ? F::TEAMS : F::STEP; }

    __device__ __forceinline__ int count_tiles(int tiles) const {
        if (F::SCHEDULING == EITHER && !in_cluster) return (tiles - first_tile + F::TEAMS - 1) / F::TEAMS;
        return (tiles - first_tile + F::STEP - 1) / F::STEP;
    }

    __device__ __forceinline__ void barrier() const {
        if constexpr (F::TEAM == 1)
            __syncwarp();
        else
            asm volatile("bar.sync %0, %1;" ::"r"(1 + index), "n"(LANES) : "memory");
    }

    // Return the stage of the team's k-th tile: its keys, then its values.
    __device__ __forceinline__ char* stage(int k) const {
        return shared + (k % F::STAGES * F::TEAMS + index) * 2 * F::Tile::BYTES;
    }

    __device__ __forceinline__ int token(const KvSplit& kv_split, int k) const {
        return kv_split.begin + (first_tile + k * step()) * TILE;
    }

    // Return the j-th row whose scores the lane holds.
    __device__ __forceinline__ Row row_of(const Params& p, const KvSplit& kv_split, int j) const {
        return Row(p, kv_split, kv_split.row_block * F::ROWS + member * F::Rows::ROWS + F::Rows::row(lane, j));
    }

    // Return the j-th row whose query the lane holds.
    __device__ __forceinline__ Row query_row_of(const Params& p, const KvSplit& kv_split, int j) const {
        return Row(p, kv_split, kv_split.row_block * F::ROWS + member * F::Rows::ROWS + F::Rows::query_row(lane, j));
    }

    // Clear dimensions head_dim to F::DIMS - 1 of the keys. The copies do not write them, and they must not change the
    // scores.
    __device__ __forceinline__ void clear_padding() const {
        if (F::HEAD_DIM != F::DIMS && chunks < F::Tile::CHUNKS)
            for (int i = lane_of_team; i < F::STAGES * (F::Tile::CHUNKS - chunks) * TILE; i += LANES) {
                const int chunk = chunks + i / TILE / F::STAGES;
                char* const to = stage(i / TILE) + F::Tile::key_chunk(chunk, i % TILE) * 16;
                *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
            }
    }

    // Clear the values of slots outside [low, length): they may hold NaN, and 0 * NaN is NaN.
    __device__ __forceinline__ void clear_values(const KvSplit& kv_split, int token, char* stage) const {
        char* const values = stage + F::Tile::BYTES;
        for (int i = lane_of_team; i < TILE * F::DIMS; i += LANES) {
            const int t = i % TILE, dim = i / TILE;
            const bool in_window = token + t >= kv_split.low;
            if (token + t < kv_split.length && in_window) continue;
            const int at = F::Tile::value_at(dim, t);
            if constexpr (F::FP8)
                values[at] = 0;
            else
                reinterpret_cast<unsigned short*>(values)[at] = 0;
        }
        barrier();
    }
};
