// Tile scheduler of gemm_fp8_wgmma and gemm_fp8_blocks: it selects a cluster's tiles and their order. A deal is the
// distribution of a set of tiles to the clusters, round-robin. The window is the 32 experts whose groups the scheduler
// holds in shared memory; it moves on when the cluster has no more tiles there.
#pragma once
#include "common/cluster.cuh"
#include "moe_gemm/fp8_layout.cuh"
#include "moe_gemm/groups.cuh"

// Iterates over the tiles of a cluster. Every producer warp runs its own copy of this scheduler. Tiles are distributed
// ("dealt") to the clusters round-robin.
//
// The last tile of a group is called odd if it has at most half of the usual rows (then it takes much less time) or a
// tail (then it takes more time). If all tiles were dealt together, the same clusters could get all odd tiles: with two
// tiles per group, every second cluster. So with DEALS_ODD there are two deals, one for the odd tiles and one for all
// other tiles. The odd tile of a group comes after the other tiles of the group.
template <class Layout> struct Fp8Tiles {
    // A strip is the columns of the result that a cluster computes at once. A row tile is TOKENS rows of a group. The
    // order of tiles is: the first strip of BAND row tiles, then the next strip of the same row tiles, and so on. The
    // tiles that run at the same time then form roughly a square of the result, and the operands of the square fit in
    // L2.
    static constexpr int BAND = 2048 / Layout::TILE_TOKENS;
    static constexpr int MOST = (1 << 26) - 1; // cap of an expert's tiles; the sum over 32 experts fits in an int
    static constexpr int TOKENS = Layout::TILE_TOKENS, CLUSTER = Layout::CLUSTER, OUT_COLUMNS = Layout::OUT_COLUMNS;
    static constexpr int STRIPS = Layout::SHARES_ROWS ? CLUSTER : 1; // blocks of a cluster with different columns

    const MappedGemmParams& p;
    int4 (&groups)[32]; // experts `window` to `window + 31`, see Fp8Shared
    const int strips;   // number of strips of the result
    int window, ahead;  // window: first expert of the window; ahead: index of the cluster's next tile in the window
    // DEALS_ODD. odd: bit mask of the window's experts whose last tile is odd; such an expert has one odd tile per
    // strip. odd_ahead: index of the cluster's next odd tile among the odd tiles of the window. `ahead` and the numbers
    // of tiles in `groups` do not count odd tiles.
    unsigned odd = 0;
    int odd_ahead = 0;

    __device__ __forceinline__ Fp8Tiles(const MappedGemmParams& p, int4 (&groups)[32])
        : p(p), groups(groups),
          strips(((Layout::GATED ? p.n / 2 : p.n) + OUT_COLUMNS * STRIPS - 1) / (OUT_COLUMNS * STRIPS)), window(0),
          ahead(blockIdx.x / CLUSTER) {
        read_window();
        if constexpr (Layout::DEALS_ODD) {
            // The deal of odd tiles continues the deal of the other tiles: if cluster c gets the last regular tile of
            // the first window, cluster `c + 1` gets the first odd tile.
            const int clusters = gridDim.x / CLUSTER;
            odd_ahead = ahead - groups[31].w % clusters;
            if (odd_ahead < 0) odd_ahead += clusters;
        }
    }

    // Return the number of row tiles of a group of `rows` rows. If at most TAIL rows are left after the last whole
    // tile, they become the tail of that tile.
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
        if constexpr (Layout::DEALS_ODD) {
            const long long last = group.y - (tiles - 1) * TOKENS;
            const bool is_odd = tiles && (last <= TOKENS / 2 || last > TOKENS);
            odd = __ballot_sync(FULL_WARP, is_odd);
            tiles -= is_odd;
        }
        group.z = int(min(tiles * strips, (long long)MOST));
        group.w = lanes_inclusive_sum<32>(group.z);
        __syncwarp();
        groups[lane] = group;
        __syncwarp();
    }

    // Return a bit mask of the experts of the window (32 experts). The lowest set bit is the expert that has the
    // cluster's next odd tile; the bits of all later experts are set too. Return 0 if the window has no further odd
    // tile for this cluster.
    __device__ __forceinline__ unsigned experts_with_odd_tiles() const {
        if constexpr (!Layout::DEALS_ODD) return 0;
        const unsigned upto = odd & ((2u << threadIdx.x % 32) - 1);
        return __ballot_sync(FULL_WARP, __popc(upto) * strips > odd_ahead);
    }

    // Set `tile` to the cluster's next odd tile and advance `odd_ahead`. The tile belongs to expert `window + at`.
    __device__ __forceinline__ void take_odd(Fp8Tile& tile, int at) {
        const int4 group = groups[at];
        const int strip = odd_ahead - __popc(odd & ((1u << at) - 1)) * strips;
        const int start = int(tiles_of<unsigned>(group.y) - 1) * TOKENS;
        tile.x = window + at;
        tile.y = group.x + start;
        tile.z = group.y - start;
        tile.w = (strip * STRIPS + cluster_rank<STRIPS>()) * OUT_COLUMNS;
        odd_ahead += gridDim.x / CLUSTER;
    }

    // Find the next tile. Return false if there is none.
    __device__ __forceinline__ bool next(Fp8Tile& tile) {
        unsigned beyond, odd_beyond = 0; // bit masks: the expert with the next tile and all later experts
        while (!((beyond = __ballot_sync(FULL_WARP, groups[threadIdx.x % 32].w > ahead)) |
                 (odd_beyond = experts_with_odd_tiles()))) {
            ahead -= groups[31].w;
            odd_ahead -= __popc(odd) * strips;
            window += 32;
            if (window >= p.experts) return false;
            read_window();
        }
        if constexpr (Layout::DEALS_ODD) {
            // `at` is the expert that has the cluster's next regular tile, `odd_at` the expert that has its next odd
            // tile. Both are indices in the window of 32 experts; 32: none. The tile of the earlier expert comes first.
            const int at = __clz(__brev(beyond)), odd_at = __clz(__brev(odd_beyond));
            if (odd_at < at) {
                take_odd(tile, odd_at);
                return true;
            }
        }
        const int at = __ffs(beyond) - 1;
        const int4 group = groups[at];
        const unsigned i = ahead - (group.w - group.z);
        const unsigned of_band = BAND * strips, band = i / of_band, in_band = i - band * of_band;
        const unsigned tiles = tiles_of<unsigned>(group.y) - (odd >> at & 1);
        const unsigned height = min(tiles - band * BAND, unsigned(BAND));
        const unsigned strip = in_band / height, start = (band * BAND + in_band - strip * height) * TOKENS;
        tile.x = window + at;
        tile.y = group.x + start;
        tile.z = min(group.y - int(start), TOKENS);
        if (Layout::TAIL && group.y - int(start) <= TOKENS + Layout::TAIL) tile.z = group.y - int(start);
        tile.w = (strip * STRIPS + cluster_rank<STRIPS>()) * OUT_COLUMNS;
        ahead += gridDim.x / CLUSTER;
        return true;
    }
};
