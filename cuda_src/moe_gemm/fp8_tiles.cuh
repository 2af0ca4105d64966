// The scheduler of gemm_fp8_wgmma: which tiles a cluster has, in which order.
#pragma once
#include "common/cluster.cuh"
#include "moe_gemm/fp8_layout.cuh"
#include "moe_gemm/groups.cuh"

// The tiles of a cluster, as each of its warps that loads finds them for itself. Tiles are dealt to the clusters in turn.
//
// Odd tiles. The last tile of a group takes much less time than others with up to half of the rows, and more with a
// tail. Dealt with all others they may all fall to the same clusters: with two tiles of a group, to every second one. So
// with DEALS_ODD they have a deal of their own, in turn as well, and come behind the other tiles of their group.
template <class Layout> struct Fp8Tiles {
    // Tiles of rows that go with the same weights before the next weights: what all clusters work on at once is about a
    // square of tiles, whose operands fit in L2.
    static constexpr int BAND = 2048 / Layout::TILE_TOKENS;
    static constexpr int MOST = (1 << 26) - 1; // tiles of an expert, of which 32 can be added
    static constexpr int TOKENS = Layout::TILE_TOKENS, CLUSTER = Layout::CLUSTER, OUT_COLUMNS = Layout::OUT_COLUMNS;
    static constexpr int STRIPS = Layout::SHARES_ROWS ? CLUSTER : 1; // of a cluster, one after the other

    const MappedGemmParams& p;
    int4 (&groups)[32]; // of the experts from `window` on, as Fp8Shared has them
    const int strips;   // the columns of the result, by those of a cluster
    int window, ahead;  // ahead: the next tile, counted from the window's first
    // With DEALS_ODD: the experts of the window that have one, each of which counts as one of
    // every strip, and the next one, counted from the window's first. All other counts are of the other tiles.
    unsigned odd = 0;
    int odd_ahead = 0;

    __device__ __forceinline__ Fp8Tiles(const MappedGemmParams& p, int4 (&groups)[32])
        : p(p), groups(groups),
          strips(((Layout::GATED ? p.n / 2 : p.n) + OUT_COLUMNS * STRIPS - 1) / (OUT_COLUMNS * STRIPS)), window(0),
          ahead(blockIdx.x / CLUSTER) {
        read_window();
        if constexpr (Layout::DEALS_ODD) {
            // The deal of odd tiles goes on with the cluster behind the last of the other tiles.
            const int clusters = gridDim.x / CLUSTER;
            odd_ahead = ahead - groups[31].w % clusters;
            if (odd_ahead < 0) odd_ahead += clusters;
        }
    }

    // Tiles of rows of a group. A tail makes the last one larger, so that few rows are no tile of their own.
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

    // The experts whose odd tile, or one behind it, is ahead.
    __device__ __forceinline__ unsigned experts_with_odd_tiles() const {
        if constexpr (!Layout::DEALS_ODD) return 0;
        const unsigned upto = odd & ((2u << threadIdx.x % 32) - 1);
        return __ballot_sync(FULL_WARP, __popc(upto) * strips > odd_ahead);
    }

    // Take the next of the odd tiles, which is of expert `at` of the window.
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

    // Find the next tile; false if there is none.
    __device__ __forceinline__ bool next(Fp8Tile& tile) {
        unsigned beyond, odd_beyond = 0; // the experts with tiles from the next one on
        while (!((beyond = __ballot_sync(FULL_WARP, groups[threadIdx.x % 32].w > ahead)) |
                 (odd_beyond = experts_with_odd_tiles()))) {
            ahead -= groups[31].w;
            odd_ahead -= __popc(odd) * strips;
            window += 32;
            if (window >= p.experts) return false;
            read_window();
        }
        if constexpr (Layout::DEALS_ODD) {
            // The first expert of each deal, 32 without one.
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
