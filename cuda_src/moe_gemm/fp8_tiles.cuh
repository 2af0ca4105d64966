// Tile scheduler of gemm_fp8_wgmma and gemm_fp8_blocks. Its window is the 32 experts whose groups it holds in shared
// memory.
#pragma once
#include "common/cluster.cuh"
#include "moe_gemm/fp8_layout.cuh"
#include "moe_gemm/groups.cuh"

// Iterates over the tiles of a cluster. The clusters get tiles round-robin. Every producer warp has its own copy.
//
// The last tile of a group is called odd if it has at most half of the usual rows, and so takes less time, or has a
// tail (rows beyond the usual number), and so takes more time. With two tiles per group, every second cluster would get
// all odd tiles. So with SEPARATE_ODD odd tiles have a round-robin of their own, after the other tiles of their group.
template <class Layout> struct Fp8Tiles {
    // A strip is the result columns of a cluster; a row tile is TOKENS rows. All strips of BAND row tiles come before
    // the next BAND row tiles. So concurrent tiles form roughly a square, whose operands fit in L2.
    static constexpr int BAND = 2048 / Layout::TILE_TOKENS;
    static constexpr int MAX_TILES = (1 << 26) - 1; // of an expert; the sum over 32 experts fits in an int
    static constexpr int TOKENS = Layout::TILE_TOKENS, CLUSTER = Layout::CLUSTER, OUT_COLUMNS = Layout::OUT_COLUMNS;
    static constexpr int STRIPS = Layout::SHARES_ROWS ? CLUSTER : 1; // blocks of a cluster with different columns

    const MappedGemmParams& p;
    int4 (&groups)[32]; // the window; see Fp8Shared
    const int strips;
    int window, next_tile; // next_tile: index in the window
    // These members are for SEPARATE_ODD. `odd`: bit mask of the window's experts that have odd tiles; such an expert
    // has one odd tile per strip. `next_odd`: index of the cluster's next odd tile among the window's odd tiles.
    // `next_tile` and `groups` do not count odd tiles.
    unsigned odd = 0;
    int next_odd = 0;

    __device__ __forceinline__ Fp8Tiles(const MappedGemmParams& p, int4 (&groups)[32])
        : p(p), groups(groups),
          strips(((Layout::GATED ? p.n / 2 : p.n) + OUT_COLUMNS * STRIPS - 1) / (OUT_COLUMNS * STRIPS)), window(0),
          next_tile(blockIdx.x / CLUSTER) {
        read_window();
        if constexpr (Layout::SEPARATE_ODD) {
            // Odd tiles continue the round-robin: if cluster c gets the last regular tile of the first window, cluster
            // `c + 1` gets the first odd tile.
            const int clusters = gridDim.x / CLUSTER;
            next_odd = next_tile - groups[31].w % clusters;
            if (next_odd < 0) next_odd += clusters;
        }
    }

    // Return the number of row tiles of a group. Up to TAIL rows after the last full tile belong to that tile, as its
    // tail.
    template <typename Count> static __device__ __forceinline__ Count tiles_of(int rows) {
        if constexpr (Layout::TAIL) rows = rows > TOKENS ? rows - Layout::TAIL : rows;
        return (rows + TOKENS - Count(1)) / TOKENS;
    }

    __device__ __forceinline__ void read_window() {
        const int lane = threadIdx.x % 32, expert = window + lane;
        int4 group = make_int4(0, 0, 0, 0);
        if (expert < p.experts) {
            const GroupRows rows = rows_of(p, expert);
            group.x = rows.first, group.y = rows.count;
        }
        long long tiles = tiles_of<long long>(group.y);
        if constexpr (Layout::SEPARATE_ODD) {
            const long long last = group.y - (tiles - 1) * TOKENS;
            const bool is_odd = tiles && (last <= TOKENS / 2 || last > TOKENS);
            odd = __ballot_sync(FULL_WARP, is_odd);
            tiles -= is_odd;
        }
        group.z = int(min(tiles * strips, (long long)MAX_TILES));
        group.w = lanes_inclusive_sum<32>(group.z);
        __syncwarp();
        groups[lane] = group;
        __syncwarp();
    }

    // Return a bit mask of the window's experts: the expert with the cluster's next odd tile, and all later experts. It
    // is 0 if the window has no such tile.
    __device__ __forceinline__ unsigned experts_with_odd_tiles() const {
        if constexpr (!Layout::SEPARATE_ODD) return 0;
        const unsigned upto = odd & ((2u << threadIdx.x % 32) - 1);
        return __ballot_sync(FULL_WARP, __popc(upto) * strips > next_odd);
    }

    // Set `tile` to the cluster's next odd tile, which belongs to expert `window + at`.
    __device__ __forceinline__ void take_odd(Fp8Tile& tile, int at) {
        const int4 group = groups[at];
        const int strip = next_odd - __popc(odd & ((1u << at) - 1)) * strips;
        const int start = int(tiles_of<unsigned>(group.y) - 1) * TOKENS;
        tile.x = window + at;
        tile.y = group.x + start;
        tile.z = group.y - start;
        tile.w = (strip * STRIPS + cluster_rank<STRIPS>()) * OUT_COLUMNS;
        next_odd += gridDim.x / CLUSTER;
    }

    __device__ __forceinline__ bool next(Fp8Tile& tile) {
        unsigned candidates, odd_candidates = 0; // bit masks: the next tile's expert and all later experts
        while (!((candidates = __ballot_sync(FULL_WARP, groups[threadIdx.x % 32].w > next_tile)) |
                 (odd_candidates = experts_with_odd_tiles()))) {
            next_tile -= groups[31].w;
            next_odd -= __popc(odd) * strips;
            window += 32;
            if (window >= p.experts) return false;
            read_window();
        }
        if constexpr (Layout::SEPARATE_ODD) {
            // Experts of the cluster's next regular tile (`at`) and next odd tile (`odd_at`); 32: none. The earlier
            // expert comes first.
            const int at = __clz(__brev(candidates)), odd_at = __clz(__brev(odd_candidates));
            if (odd_at < at) {
                take_odd(tile, odd_at);
                return true;
            }
        }
        const int at = __ffs(candidates) - 1;
        const int4 group = groups[at];
        const unsigned i = next_tile - (group.w - group.z);
        const unsigned band_size = BAND * strips, band = i / band_size, in_band = i - band * band_size;
        const unsigned tiles = tiles_of<unsigned>(group.y) - (odd >> at & 1);
        const unsigned height = min(tiles - band * BAND, unsigned(BAND));
        const unsigned strip = in_band / height, start = (band * BAND + in_band - strip * height) * TOKENS;
        tile.x = window + at;
        tile.y = group.x + start;
        tile.z = min(group.y - int(start), TOKENS);
        if (Layout::TAIL && group.y - int(start) <= TOKENS + Layout::TAIL) tile.z = group.y - int(start);
        tile.w = (strip * STRIPS + cluster_rank<STRIPS>()) * OUT_COLUMNS;
        next_tile += gridDim.x / CLUSTER;
        return true;
    }
};
