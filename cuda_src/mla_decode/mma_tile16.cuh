// Copy and multiply the tiles of a 16-bit cache in attend_mma.
#pragma once
#include "common/fp8.cuh"
#include "mla_decode/mma_form.cuh"
#include "mla_decode/mma_queries.cuh"
#include "mla_decode/mma_ring.cuh"
#include "mla_decode/rows.cuh"

// A lane's ldmatrix addresses, as byte offsets in a swizzled tile. An XOR moves an offset by 16 dimensions within a
// line of 128 bytes.
template <typename F> struct Tile16 {
    using T = typename F::T;
    static constexpr int M = F::M, N = F::N, V = F::V;
    int of_tokens[N / 2];                // for fragments 2 j and 2 j + 1; those that the warp owns come first
    int of_columns;                      // for two column fragments
    int last_line_offset, last_line_xor; // for the last line: a sum, then an XOR with `of_tokens`

    __device__ __forceinline__ explicit Tile16(const Thread<F>& thread) {
        const int lane = thread.lane, dim_range = thread.dim_range;
#pragma unroll
        for (int j = 0; j < N / 2; ++j)
            of_tokens[j] =
                (thread.token_range * N + (2 * j + lane / 16 + dim_range * F::OWNED_FRAGMENTS) % N) * 8 * F::PITCH +
                F::chunk_at(lane % 8, F::chunk_of_step(dim_range, 0) + lane / 8 % 2);
        of_columns = F::chunk_at(lane % 16, F::column_of(thread.group_warp, 0) / 8 + lane / 16);
        last_line_offset = (F::LINES - 1) * 128 - dim_range * F::LINE_STEPS * 32;
        last_line_xor = dim_range * F::LAST_LINE_STEPS * 32;
    }

    // Eight lanes copy one token, 128 bytes at a time.
    static __device__ __forceinline__ void copy(const Params& p, const Thread<F>& thread,
                                                const TokenAddresses& addresses, int copy_warp, unsigned tile_at,
                                                unsigned) {
        if constexpr (F::CONVERTS) {
            convert(thread, addresses, copy_warp, tile_at);
            return;
        }
        const int lane = thread.lane, chunk = lane % 8;
#pragma unroll
        for (int i = 0; i < F::COPIED_TOKENS; i += 4) {
            const int mine = i + lane / 8, t = copy_warp * F::COPIED_TOKENS + mine;
            const char* const source = addresses.of(mine) + chunk * 16;
            const unsigned to = tile_at + F::chunk_at(t, chunk);
            const bool exists = addresses.valid_lanes >> mine & 1;
#pragma unroll
            for (int line = 0; line < F::DIMS / 64; ++line)
                if (F::DIM || line * 64 + chunk * 8 < p.head_dim)
                    copy_async_or_zero(to + line * 128, source + line * 128, exists);
        }
    }

    // A line has 64 elements. They share one scale, or are the rotary part.
    static __device__ __forceinline__ void convert(const Thread<F>& thread, const TokenAddresses& addresses,
                                                   int copy_warp, unsigned tile_at) {
        constexpr int LATENT_LINES = PAGED_LATENT / 64;
        const int lane = thread.lane, chunk = lane % 8;
#pragma unroll 1
        for (int i = 0; i < F::COPIED_TOKENS; i += 4) {
            const int mine = i + lane / 8, t = copy_warp * F::COPIED_TOKENS + mine;
            const char *const source = addresses.of(mine), *const scales = addresses.scales_of(mine);
            const unsigned to = tile_at + F::chunk_at(t, chunk);
            const bool exists = addresses.valid_lanes >> mine & 1;
            // With 64 rows, loading more than four lines at once would spill registers.
#pragma unroll
            for (int first = 0; first < LATENT_LINES; first += 4) {
                uint2 latent[4] = {};
                unsigned exponents = 0;
                if (exists) {
                    exponents = *reinterpret_cast<const unsigned*>(scales + first);
#pragma unroll
                    for (int line = first; line < min(first + 4, LATENT_LINES); ++line)
                        latent[line - first] = *reinterpret_cast<const uint2*>(source + line * 64 + chunk * 8);
                }
#pragma unroll
                for (int line = first; line < min(first + 4, LATENT_LINES); ++line) {
                    const float scale = of_e8m0(exponents >> (line - first) * 8 & 255);
                    const uint2 low = scaled(latent[line - first].x, scale),
                                high = scaled(latent[line - first].y, scale);
                    store_shared(to + line * 128, make_uint4(low.x, low.y, high.x, high.y));
                }
            }
            uint4 rotary = {};
            if (exists) rotary = *reinterpret_cast<const uint4*>(source + PAGED_LATENT + chunk * 16);
            if constexpr (!IS_BFLOAT16<T>)
                rotary = make_uint4(of_bfloat16(rotary.x), of_bfloat16(rotary.y), of_bfloat16(rotary.z),
                                    of_bfloat16(rotary.w));
            store_shared(to + LATENT_LINES * 128, rotary);
        }
    }

    static __device__ __forceinline__ uint2 scaled(unsigned four, float scale) {
        unsigned halves[2], made[2];
        to_halves<__nv_fp8_e4m3>(halves, four);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&halves[i]));
            made[i] = pack<T>(both.x * scale, both.y * scale);
        }
        return make_uint2(made[0], made[1]);
    }

    static __device__ __forceinline__ unsigned of_bfloat16(unsigned pair) {
        return pack<T>(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    }

    struct Queries : QueryFragments<F> {
        using QueryFragments<F>::QueryFragments;

        __device__ __forceinline__ void load_split(const Params& p, const Split& split, const Thread<F>& thread) {
            const QueryRows<F> rows(p, split, thread);
            this->fill(thread, [&](int step, int m, unsigned (&a)[4]) { rows.load(p, thread, step, m, a); });
        }
    };

    __device__ __forceinline__ void add_scores(const Params& p, const Thread<F>& thread, float (&scores)[N][M][4],
                                               const Queries& queries, const char*, unsigned tile_at) const {
#pragma unroll
        for (int step = 0; step < F::STEPS; ++step) {
            if (!F::DIM && F::chunk_of_step(thread.dim_range, step) * 8 >= p.head_dim) continue;
            unsigned a[M][4], b[4];
            queries.load(step, a);
#pragma unroll
            for (int j = 0; j < N / 2; ++j) {
                const unsigned from = tile_at + of_tokens[j];
                if (step < F::LINE_STEPS)
                    ldmatrix(b, (from ^ step % 4 * 32) + step / 4 * 128);
                else
                    ldmatrix(b, ((from + last_line_offset) ^ last_line_xor ^ (step - F::LINE_STEPS) * 32));
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    mma_m16n8k16<T>(scores[2 * j][m], a[m], b[0], b[1]);
                    mma_m16n8k16<T>(scores[2 * j + 1][m], a[m], b[2], b[3]);
                }
            }
        }
    }

    struct Scales {
        __device__ __forceinline__ void load(const Thread<F>&, const char*) {}
        __device__ __forceinline__ float exponent(int, int) const { return 0.f; }
        __device__ __forceinline__ unsigned pack_scaled(int, int, float low, float high) const {
            return pack<T>(low, high);
        }
    };

    __device__ __forceinline__ void add_values(const Params& p, const Thread<F>& thread, float (&out)[M][V][4],
                                               const char* probabilities, unsigned tile_at) const {
        // With 64 rows, unrolling all steps would spill registers.
        constexpr bool IS_TIGHT = __CUDA_ARCH__ < 900 || (F::CONVERTS && __CUDA_ARCH__ >= 1000);
        constexpr int STEPS_AT_ONCE = M > 1 && IS_TIGHT ? 1 : F::TILE / 16;
#pragma unroll STEPS_AT_ONCE
        for (int step = 0; step < F::TILE / 16; ++step) {
            unsigned a[M][4];
            load_probabilities<F>(a, probabilities, step);
            const unsigned tokens_at = tile_at + step * 16 * F::PITCH;
#pragma unroll
            for (int n = 0; n < V; n += 2) {
                const int column = F::column_of(thread.group_warp, n);
                if (!F::DIM_V && column >= p.head_dim_v) continue;
                unsigned b[4];
                if (n < F::LINE_V)
                    ldmatrix_trans(b, ((tokens_at + of_columns) ^ n % 8 * 16) + n / 8 * 128);
                else
                    ldmatrix_trans(b, tokens_at + F::chunk_at(thread.lane % 16, column / 8));
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    mma_m16n8k16<T>(out[m][n], a[m], b[0], b[1]);
                    if (n + 1 < V) mma_m16n8k16<T>(out[m][min(n + 1, V - 1)], a[m], b[2], b[3]);
                }
            }
        }
    }

    static __device__ __forceinline__ void store(const Params& p, const Thread<F>& thread, const Destination<T>& to,
                                                 const float (&out)[V][4], int j) {
        to.template store<F::LINE_V, F::DIM_V>(p, out, j, F::column_of(thread.group_warp, 0));
        if constexpr (F::LAST_LINE_V)
            to.template store<F::LAST_LINE_V, F::DIM_V>(p, out + F::LINE_V, j,
                                                        F::column_of(thread.group_warp, F::LINE_V));
    }
};
