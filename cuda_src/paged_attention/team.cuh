// Teams of warps that share tiles, and the position of a thread in its team.
#pragma once
#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "paged_attention/pieces.cuh"

constexpr int TILE = 16; // tokens

// The stages of the pipelines. A stage has one tile of each team. The teams' results overwrite the last stage.
extern __shared__ __align__(128) char shared[];

// A team of F::TEAM warps. The team takes every `step()`-th tile of a piece, and each of its warps takes F::Rows::ROWS
// of the piece's rows. The members describe the calling thread.
template <typename F> struct Team {
    static constexpr int LANES = 32 * F::TEAM;

    const int head_dim, block_size, chunks; // chunks of 16 bytes per token
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int index = warp / F::TEAM, member = warp % F::TEAM, lane_of_team = member * 32 + lane;
    const int pair = lane % 4;             // column pair in the fragments of common/mma.cuh
    bool in_cluster = F::DEALING != QUEUE; // whether the blocks of a cluster share a piece's tiles
    int first_tile = cluster_rank<F::CLUSTER>() * F::TEAMS + index;

    __device__ __forceinline__ explicit Team(const Params& p)
        : head_dim(F::HEAD_DIM ? F::HEAD_DIM : p.head_dim), block_size(F::BLOCK_SIZE ? F::BLOCK_SIZE : p.block_size),
          chunks(head_dim / F::Tile::CHUNK) {}

    // From now on, process pieces without the other blocks of the cluster.
    __device__ __forceinline__ void leave_cluster() { in_cluster = false, first_tile = index; }

    // Return the distance between consecutive tiles of the team.
    __device__ __forceinline__ int step() const { return F::DEALING == EITHER && !in_cluster ? F::TEAMS : F::STEP; }

    // Return the number of tiles that the team takes from a piece of `tiles` tiles.
    __device__ __forceinline__ int share(int tiles) const {
        if (F::DEALING == EITHER && !in_cluster) return (tiles - first_tile + F::TEAMS - 1) / F::TEAMS;
        return (tiles - first_tile + F::STEP - 1) / F::STEP;
    }

    __device__ __forceinline__ void barrier() const {
        if constexpr (F::TEAM == 1)
            __syncwarp();
        else
            asm volatile("bar.sync %0, %1;" ::"r"(1 + index), "n"(LANES) : "memory");
    }

    // Return the address of the stage for the team's k-th tile. It holds the keys, then the values.
    __device__ __forceinline__ char* stage(int k) const {
        return shared + (k % F::STAGES * F::TEAMS + index) * 2 * F::Tile::BYTES;
    }

    // Return the first token of the team's k-th tile of `segment`.
    __device__ __forceinline__ int token(const Segment& segment, int k) const {
        return segment.begin + (first_tile + k * step()) * TILE;
    }

    // Return the j-th of the two rows whose scores the lane holds.
    __device__ __forceinline__ Row row_of(const Params& p, const Segment& segment, int j) const {
        return Row(p, segment, segment.row_block * F::ROWS + member * F::Rows::ROWS + F::Rows::row(lane, j));
    }

    // Return the j-th of the F::Rows::QUERY_ROWS rows whose query the lane holds.
    __device__ __forceinline__ Row query_row_of(const Params& p, const Segment& segment, int j) const {
        return Row(p, segment, segment.row_block * F::ROWS + member * F::Rows::ROWS + F::Rows::query_row(lane, j));
    }

    // Set dimensions head_dim to F::DIMS - 1 of the keys to 0 in all stages. The copies do not write these dimensions,
    // and they must not change the scores.
    __device__ __forceinline__ void clear_padding() const {
        if (F::HEAD_DIM != F::DIMS && chunks < F::Tile::CHUNKS)
            for (int i = lane_of_team; i < F::STAGES * (F::Tile::CHUNKS - chunks) * TILE; i += LANES) {
                const int chunk = chunks + i / TILE / F::STAGES;
                char* const to = stage(i / TILE) + F::Tile::key_chunk(chunk, i % TILE) * 16;
                *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
            }
    }

    // Set the values of a tile's tokens outside [low, length) to 0. Their slots may hold NaN, and 0 * NaN is NaN.
    __device__ __forceinline__ void clear_values(const Segment& segment, int token, char* stage) const {
        char* const values = stage + F::Tile::BYTES;
        for (int i = lane_of_team; i < TILE * F::DIMS; i += LANES) {
            const int t = i % TILE, dim = i / TILE;
            const bool in_window = token + t >= segment.low;
            if (token + t < segment.length && in_window) continue;
            const int at = F::Tile::value_at(dim, t);
            if constexpr (F::FP8)
                values[at] = 0;
            else
                reinterpret_cast<unsigned short*>(values)[at] = 0;
        }
        barrier();
    }
};
