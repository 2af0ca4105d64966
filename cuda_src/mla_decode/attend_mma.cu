// Attention at decode time over a latent cache (multi-head latent attention, DeepSeek), by mma.sync, on every GPU from
// sm_80 on. The heads of a group share one key per token; its first head_dim_v numbers are the value.
//
//   score[t] = scale * dot(q[b, i, head, :], cache[t, head / group, :])    if causal for t <= length - query_tokens + i
//   p        = softmax over the tokens
//   out      = sum_t p[t] * cache[t, head / group, : head_dim_v], times exp(lse) / (exp(lse) + exp(sink[head]))
//   lse      = log sum_t exp(score[t])
//
// A row with no token has out = 0 and lse = +inf.
//
// Grid: (ceil(rows / ROWS), kv_heads, parts) blocks of 256 threads, Form<...>::BYTES of dynamic shared memory.
#include "common/fp8.cuh"
#include "common/hopper.cuh"
#include "common/mma.cuh"
#include "common/warp.cuh"
#include "mla_decode/mma_form.cuh"
#include "mla_decode/rows.cuh"

__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same; whether any of the threads says so.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool mine) {
    unsigned any;
    asm volatile("{ .reg .pred mine, any;\n"
                 "  setp.ne.u32 mine, %1, 0;\n"
                 "  bar.red.or.pred any, %2, %3, mine;\n"
                 "  selp.u32 %0, 1, 0, any; }"
                 : "=r"(any)
                 : "r"(unsigned(mine)), "r"(id), "r"(threads)
                 : "memory");
    return any;
}

// Of the largest of a token's scales, as a power of two; not below -80, so that 2 to minus that many is far from
// infinity.
__device__ __forceinline__ float exponent_of(float4 scales) {
    const float largest = fmaxf(fmaxf(fabsf(scales.x), fabsf(scales.y)), fmaxf(fabsf(scales.z), fabsf(scales.w)));
    return float(max(int(__float_as_uint(largest) >> 23) - 127, -80));
}

__device__ __forceinline__ float component(float4 four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// Which tokens of a tile are there, a bit each, and whether the entry of one was bad. The tokens of a copying warp have
// 64 / COPIERS bits.
struct alignas(16) Arrival {
    unsigned long long valid, bad;
};

__device__ constexpr unsigned long long all_valid(int copiers, int copied) {
    unsigned long long all = 0;
    for (int copier = 0; copier < copiers; ++copier) all |= ((1ull << copied) - 1) << copier * (64 / copiers);
    return all;
}

// T: of the queries and results. FP8: an 8-bit cache (576, 512 only). ROWS: 16, 32, 64. TILE: 16, 32 or 64 tokens.
// STAGES: tiles of a ring in shared memory. DIM, DIM_V: 576 and 512; 0: from the arguments, multiples of 16 up to 576
// (not with ROWS = 64).
template <typename T, bool FP8, int ROWS, int TILE, int STAGES, int DIM, int DIM_V>
__global__ __launch_bounds__(256, 1) void attend_mma(const __grid_constant__ Params p) {
    using F = Form<T, FP8, ROWS, TILE, STAGES, DIM, DIM_V>;
    constexpr int M = F::M, N = F::N, V = F::V;

    extern __shared__ __align__(1024) char shared[];
    const unsigned shared_at = shared_address(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = lane / 4, pair = lane % 4; // in the fragments
    const int group = warp / F::MEMBERS, member = warp % F::MEMBERS;
    const int half = member / F::DEPTHS, depth = member % F::DEPTHS;
    const bool owner = depth < F::OWNERS;
    const int kv_head = blockIdx.y, first_row = blockIdx.x * ROWS;
    const int head_dim = DIM ? DIM : p.head_dim, head_dim_v = DIM_V ? DIM_V : p.head_dim_v;

    const Part part(p, blockIdx.z);
    if (part.first > part.last) return;

    auto group_barrier = [&] { named_barrier(1 + group, F::MEMBERS * 32); };
    // Where all threads meet. A barrier in shared memory: the sanitizer loses track of numbered ones of so many kinds.
    __shared__ unsigned long long meeting;
    int met = 0;
    auto both_groups = [&] {
        barrier_arrive(shared_address(&meeting));
        barrier_wait(shared_address(&meeting), met++);
    };
    const int ring = F::RINGS == 2 ? group * STAGES : 0; // the first of the group's stages
    auto full = [&](int stage) { return shared_at + F::BARRIERS + (ring + stage) * 16; };
    auto empty = [&](int stage) { return full(stage) + 8; };
    if constexpr (F::APART) {
        if (threadIdx.x == 0)
            for (int i = 0; i < F::RINGS * STAGES; ++i) {
                const unsigned at = shared_at + F::BARRIERS + i * 16;
                barrier_init(at, F::ARRIVING);
                barrier_init(at + 8, F::WARPS / F::RINGS);
            }
        if constexpr (F::RINGS == 2) {
            if (threadIdx.x == 0) barrier_init(shared_address(&meeting), F::WARPS * 32);
        }
        if constexpr (F::ROW_COPIES) {
            if (threadIdx.x == 0) barriers_ready();
        }
        __syncthreads();
    }

    // Tiles are copied ahead, through all visits of the part. The page of a token is looked up one tile before that.
    const bool copies = F::RINGS == 2 || warp >= F::WARPS - F::COPIERS;
    const int copier = F::RINGS == 2 ? member : warp - (F::WARPS - F::COPIERS);
    const int ring_begin = F::RINGS == 2 ? group * TILE : 0; // of a visit's tokens
    struct {
        int sequence, token, end; // the next tile
        int entry, slot;          // of this lane's token in it
        bool wanted, more;
    } ahead;
    auto enter = [&](int sequence) {
        ahead.more = false;
        for (; sequence <= part.last; ++sequence) {
            const Visit visit(p, part, sequence);
            ahead.sequence = sequence, ahead.token = visit.begin + ring_begin, ahead.end = visit.end;
            if (ahead.token < ahead.end) {
                ahead.more = true;
                break;
            }
        }
    };
    auto look_up = [&] {
        const int token = ahead.token + copier * F::COPIED + lane % F::COPIED;
        ahead.wanted = ahead.more && token < ahead.end;
        ahead.entry = -1, ahead.slot = 0;
        if (!ahead.wanted) return;
        if (p.indices) {
            const int batch = ahead.sequence / p.query_tokens;
            ahead.entry = p.indices[batch * p.indices_strides[0] +
                                    (ahead.sequence - batch * p.query_tokens) * p.indices_strides[1] + token];
        } else {
            const int page = unsigned(token) / unsigned(p.page_size);
            ahead.entry = p.block_table[ahead.sequence * p.table_stride + page];
            ahead.slot = token - page * p.page_size;
        }
    };
    Arrival* const arrivals = reinterpret_cast<Arrival*>(shared + F::ARRIVALS) + ring;
    auto copy_tile = [&](int stage) {
        if (ahead.more) {
            long long page = ahead.entry;
            bool known = ahead.wanted && unsigned(ahead.entry) < unsigned(p.pages);
            bool bad = ahead.wanted && !known;
            if (p.indices) {
                bad = ahead.wanted && ahead.entry >= (long long)p.pages * p.page_size;
                known = ahead.wanted && ahead.entry >= 0 && !bad;
                page = unsigned(ahead.entry) / unsigned(p.page_size);
                ahead.slot = ahead.entry - int(page) * p.page_size;
            }
            constexpr int ITEM = FP8 ? 1 : sizeof(T);
            const char* from = static_cast<const char*>(p.cache);
            if (known)
                from +=
                    (page * p.cache_strides[0] + ahead.slot * p.cache_strides[1] + kv_head * p.cache_strides[2]) * ITEM;
            const unsigned known_lanes = __ballot_sync(FULL_WARP, known);
            const unsigned bad_lanes = __ballot_sync(FULL_WARP, bad);
            if (lane == 0) {
                const unsigned valid = known_lanes & ((1u << F::COPIED) - 1);
                if constexpr (F::COPIERS == 8) {
                    reinterpret_cast<unsigned char*>(&arrivals[stage].valid)[copier] = valid;
                    reinterpret_cast<unsigned char*>(&arrivals[stage].bad)[copier] = bad_lanes != 0;
                } else {
                    reinterpret_cast<unsigned short*>(&arrivals[stage].valid)[copier] = valid;
                    reinterpret_cast<unsigned short*>(&arrivals[stage].bad)[copier] = bad_lanes != 0;
                }
            }
            auto source_of = [&](int i) {
                const unsigned long long mine = reinterpret_cast<unsigned long long>(from);
                const unsigned low = __shfl_sync(FULL_WARP, unsigned(mine), i);
                const unsigned high = __shfl_sync(FULL_WARP, unsigned(mine >> 32), i);
                return reinterpret_cast<const char*>((unsigned long long)high << 32 | low);
            };
            if constexpr (F::ROW_COPIES) {
                const unsigned to = shared_at + (ring + stage) * F::TILE_BYTES + (copier * F::COPIED + lane) * F::PITCH;
                constexpr unsigned ALL = (1u << F::COPIED) - 1;
                if (!p.indices && p.cache_strides[1] == F::PITCH && (known_lanes & ALL) == ALL) {
                    // One after the other, since pages are of multiples of 16 tokens.
                    if (lane == 0) copy_row(to, from, F::COPIED * F::PITCH, full(stage));
                } else if (lane < F::COPIED && known) {
                    copy_row(to, from, F::PITCH, full(stage));
                } else if (lane < F::COPIED) {
                    for (int i = 0; i < F::PITCH; i += 16) store_shared(to + i, make_uint4(0, 0, 0, 0));
                    publish_shared();
                }
            } else if constexpr (FP8) {
                // As the cache is: copies are much slower when a line of it is spread over several here.
                constexpr int CHUNKS = F::PITCH / 16, ALL = F::COPIED * CHUNKS;
                const unsigned to =
                    shared_at + (ring + stage) * F::TILE_BYTES + copier * F::COPIED * F::PITCH + lane * 16;
#pragma unroll 4
                for (int start = 0; start < ALL; start += 32) {
                    const int chunk = start + lane, t = min(chunk / CHUNKS, F::COPIED - 1);
                    const char* const source = source_of(t);
                    if (start + 32 <= ALL || chunk < ALL)
                        copy_async_or_zero(to + start * 16, source + (chunk - t * CHUNKS) * 16, known_lanes >> t & 1);
                }
            } else {
                // Eight lanes take a line of 128 bytes, all of a token one after the other.
                const int chunk = lane % 8;
#pragma unroll
                for (int i = 0; i < F::COPIED; i += 4) {
                    const int mine = i + lane / 8, t = copier * F::COPIED + mine;
                    const char* const source = source_of(mine) + chunk * 16;
                    const unsigned to = shared_at + stage * F::TILE_BYTES + F::chunk_at(t, chunk);
                    const bool there = known_lanes >> mine & 1;
#pragma unroll
                    for (int line = 0; line < F::DIMS / 64; ++line)
                        if (DIM || line * 64 + chunk * 8 < head_dim)
                            copy_async_or_zero(to + line * 128, source + line * 128, there);
                }
            }
            ahead.token += F::RINGS * TILE;
            if (ahead.token >= ahead.end) enter(ahead.sequence + 1);
            look_up();
            if constexpr (F::APART) {
                if constexpr (!F::ROW_COPIES) barrier_arrive_after_copies(full(stage));
                __syncwarp();
                if constexpr (F::ROW_COPIES) {
                    const int there = __popc(known_lanes & ((1u << F::COPIED) - 1));
                    if (lane == 0) barrier_expect(full(stage), there * F::PITCH);
                } else {
                    if (lane == 0) barrier_arrive(full(stage));
                }
            }
        }
        if constexpr (!F::APART) copies_commit();
    };
    constexpr int EARLY = F::APART ? STAGES : STAGES - 1; // tiles on their way at the start
    if (copies) {
        enter(part.first);
        look_up();
#pragma unroll 1
        for (int stage = 0; stage < EARLY; ++stage) copy_tile(stage);
    }

    // Where a lane's row of 16 bytes for ldmatrix lies in a tile: for the first product in fragments 2 j and 2 j + 1 of
    // its tokens, of which a warp's own come first; for the second in columns. Steps within a line flip bits of these.
    // (8-bit: in one fragment of its tokens, and in 16 columns.)
    constexpr int LOADED = FP8 ? 1 : 2;
    int of_tokens[N / LOADED];
#pragma unroll
    for (int j = 0; j < N / LOADED; ++j)
        if constexpr (FP8)
            of_tokens[j] = ((j + depth * F::OWN) % N * 8 + lane % 8) * F::PITCH + depth * F::SCALE_DIMS + lane / 8 * 16;
        else
            of_tokens[j] = (half * N + (2 * j + lane / 16 + depth * F::OWN) % N) * 8 * F::PITCH +
                           F::chunk_at(lane % 8, F::chunk_of_step(depth, 0) + lane / 8 % 2);
    const int of_columns = FP8 ? lane % 16 * F::PITCH + member * F::SCALE_DIMS + lane / 16 * 16
                               : F::chunk_at(lane % 16, F::column_of(member, 0) / 8 + lane / 16);
    // From there to the scale of the first of a lane's two tokens in a fragment C, and to the rotary part.
    const int to_scale = (pair * 2 - lane % 8) * F::PITCH + F::LATENT + depth * (4 - F::SCALE_DIMS) - lane / 8 * 16;
    const int to_rotary = F::ROTARY + depth * (32 - F::SCALE_DIMS) - lane / 16 * 32;
    const int rest_of_step = (F::LINES - 1) * 128 - depth * F::LINE_STEPS * 32;
    const int flip_of_step = depth * F::REST_STEPS * 32;
    uint4* const queries = reinterpret_cast<uint4*>(shared + F::QUERIES) +
                           (group * M * F::DEPTHS + depth) * (F::STEPS - F::KEPT) * 32 + lane;
    constexpr int QUERIES_OF_M = F::DEPTHS * (F::STEPS - F::KEPT) * 32;
    float4* const partial_scores = reinterpret_cast<float4*>(shared + F::PARTIAL_SCORES) + lane;
    auto partial_at = [&](int sender, int sent, int m) {
        return ((group * F::MEMBERS + sender) * F::SENT + sent) * M * 32 + m * 32;
    };
    char* const shares = shared + F::SHARES + group * F::KINDS * F::KIND_BYTES + lane * 16;
    float* const maxima = reinterpret_cast<float*>(shared + F::MAXIMA) + group * F::MEMBERS * F::GROUP_ROWS;
    float* const sums = reinterpret_cast<float*>(shared + F::SUMS) + group * F::MEMBERS * F::GROUP_ROWS;
    constexpr unsigned long long ALL_VALID = all_valid(F::COPIERS, F::COPIED);

    int stage = 0, phase = 0; // of the tile at hand
#pragma unroll 1
    for (int sequence = part.first; sequence <= part.last; ++sequence) {
        const Visit visit(p, part, sequence);
        const int group_row = first_row + (F::RINGS == 2 ? 0 : group * F::GROUP_ROWS); // the group's first

        // Fragments A of the queries. What the products of a row with 8-bit numbers are to be multiplied by.
        unsigned kept[F::KEPT ? F::KEPT : 1][M][4];
        float factor[M][2];
        {
            const T* from[M][2];
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const Row which(p, visit, kv_head, group_row + m * 16 + j * 8 + row);
                    from[m][j] = which.valid ? static_cast<const T*>(p.q) + visit.batch * p.q_strides[0] +
                                                   which.token * p.q_strides[1] + which.head * p.q_strides[2]
                                             : nullptr;
                }
            // With 8-bit numbers the product is in float16. bfloat16 reaches further: a row whose largest number has
            // exponent 0 is in its range, and to more than its precision. A lane has four neighbours of a step then.
            constexpr bool RESCALED = FP8 && IS_BFLOAT16<T>;
            auto latent = [&](int step, int m, int j) {
                const int dim = depth * F::SCALE_DIMS + step * 16 + pair * 4;
                return from[m][j] ? *reinterpret_cast<const uint2*>(from[m][j] + dim) : make_uint2(0, 0);
            };
            if constexpr (RESCALED) {
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        unsigned largest = 0;
#pragma unroll 4
                        for (int step = 0; step < F::LINE_STEPS; ++step) {
                            const uint2 four = latent(step, m, j);
                            largest = max(largest, max(four.x << 16 & 0x7fffffff, four.x & 0x7fff0000));
                            largest = max(largest, max(four.y << 16 & 0x7fffffff, four.y & 0x7fff0000));
                        }
                        largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
                        largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
                        factor[m][j] = __uint_as_float(min(max(largest >> 23, 1u), 253u) << 23);
                    }
            }
            auto load = [&](int step, int m, unsigned (&a)[4]) {
                if (FP8 && step < F::LINE_STEPS) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        uint2 four = latent(step, m, j);
                        if constexpr (RESCALED) {
                            const float down = __uint_as_float((254u << 23) - __float_as_uint(factor[m][j]));
                            four.x = pack<__half>(__uint_as_float(four.x << 16) * down,
                                                  __uint_as_float(four.x & 0xffff0000) * down);
                            four.y = pack<__half>(__uint_as_float(four.y << 16) * down,
                                                  __uint_as_float(four.y & 0xffff0000) * down);
                        }
                        a[j] = four.x, a[2 + j] = four.y;
                    }
                    return;
                }
                const int dim = F::chunk_of_step(depth, step) * 8 + pair * 2;
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    a[i] = from[m][i % 2] && (DIM || dim < head_dim)
                               ? *reinterpret_cast<const unsigned*>(from[m][i % 2] + dim + i / 2 * 8)
                               : 0;
            };
#pragma unroll
            for (int m = 0; m < M; ++m) {
#pragma unroll
                for (int step = 0; step < F::KEPT; ++step) load(step, m, kept[step][m]);
                // All halves of the tokens need the same.
#pragma unroll 2
                for (int step = F::KEPT + half; step < F::STEPS; step += F::HALVES) {
                    unsigned a[4];
                    load(step, m, a);
                    queries[m * QUERIES_OF_M + (step - F::KEPT) * 32] = make_uint4(a[0], a[1], a[2], a[3]);
                }
            }
        }

        float out[M][V][4] = {}, base[M][2], sum[M][2] = {};
#pragma unroll
        for (int m = 0; m < M; ++m) base[m][0] = base[m][1] = -LARGEST_FLOAT;
        bool bad = !visit.whole;
        const int all_see = p.causal ? causal_end(p, visit.length, group_row) : visit.length;
        // Also: none of the group still reads the last visit's sums.
        group_barrier();

#pragma unroll 1
        for (int token = visit.begin + ring_begin; token < visit.end; token += F::RINGS * TILE) {
            Arrival arrival;
            if constexpr (F::APART) {
                barrier_wait(full(stage), phase);
                arrival = arrivals[stage];
            } else {
                copies_wait<STAGES - 2>();
                // No warp is busy with the last tile any more.
                __syncthreads();
                arrival = arrivals[stage];
                copy_tile(stage == 0 ? STAGES - 1 : stage - 1);
            }
            const char* const tile = shared + (ring + stage) * F::TILE_BYTES;
            const unsigned tile_at = shared_at + (ring + stage) * F::TILE_BYTES;

            // Scores of a part of the dimensions.
            float scores[N][M][4] = {};
            auto query_of = [&](int step, unsigned (&a)[M][4]) {
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    if (step < F::KEPT) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) a[m][i] = kept[max(min(step, F::KEPT - 1), 0)][m][i];
                    } else {
                        const uint4 four = queries[m * QUERIES_OF_M + (step - F::KEPT) * 32];
                        a[m][0] = four.x, a[m][1] = four.y, a[m][2] = four.z, a[m][3] = four.w;
                    }
                }
            };
            if constexpr (FP8) {
                // Fragments of tokens at once, and steps. Of 64 rows, fewer of them: else registers spill.
                constexpr int JOINT = M > 1 && __CUDA_ARCH__ < 900 ? 1 : N < 4 || M > 1 ? 2 : 4;
                constexpr int QUADS = M > 1 && __CUDA_ARCH__ >= 1000 ? 1 : F::LINE_STEPS / 4;
#pragma unroll QUADS
                for (int quad = 0; quad < F::LINE_STEPS; quad += 4)
#pragma unroll
                    for (int first = 0; first < N; first += JOINT) {
                        unsigned words[JOINT][4];
#pragma unroll
                        for (int n = 0; n < JOINT; ++n)
                            load_matrices(words[n], tile_at + of_tokens[first + n] + quad * 16);
#pragma unroll
                        for (int step = 0; step < 4; ++step) {
                            unsigned a[M][4];
                            query_of(quad + step, a);
#pragma unroll
                            for (int n = 0; n < JOINT; ++n) {
                                unsigned b[2];
                                to_halves<__nv_fp8_e4m3>(b, words[n][step]);
#pragma unroll
                                for (int m = 0; m < M; ++m)
                                    multiply_add<__half>(scores[first + n][m], a[m], b[0], b[1]);
                            }
                        }
                    }
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const float scale =
                            *reinterpret_cast<const float*>(tile + of_tokens[n] + to_scale + i * F::PITCH);
#pragma unroll
                        for (int m = 0; m < M; ++m)
#pragma unroll
                            for (int j = 0; j < 2; ++j) {
                                if constexpr (IS_BFLOAT16<T>) scores[n][m][2 * j + i] *= factor[m][j];
                                scores[n][m][2 * j + i] *= scale;
                            }
                    }
                unsigned a[M][4];
                query_of(F::LINE_STEPS, a);
#pragma unroll
                for (int n = 0; n < N; n += 2) {
                    unsigned b[4];
                    load_matrices(b, tile_at + of_tokens[n + 1] + (lane & 16 ? 0 : of_tokens[n] - of_tokens[n + 1]) +
                                         to_rotary);
                    if constexpr (!IS_BFLOAT16<T>) {
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            b[i] = pack<T>(__uint_as_float(b[i] << 16), __uint_as_float(b[i] & 0xffff0000u));
                    }
#pragma unroll
                    for (int m = 0; m < M; ++m) {
                        multiply_add<T>(scores[n][m], a[m], b[0], b[1]);
                        multiply_add<T>(scores[n + 1][m], a[m], b[2], b[3]);
                    }
                }
            } else {
#pragma unroll
                for (int step = 0; step < F::STEPS; ++step) {
                    if (!DIM && F::chunk_of_step(depth, step) * 8 >= head_dim) continue;
                    unsigned a[M][4], b[4];
                    query_of(step, a);
#pragma unroll
                    for (int j = 0; j < N / 2; ++j) {
                        const unsigned from = tile_at + of_tokens[j];
                        if (step < F::LINE_STEPS)
                            load_matrices(b, (from ^ step % 4 * 32) + step / 4 * 128);
                        else
                            load_matrices(b, ((from + rest_of_step) ^ flip_of_step ^ (step - F::LINE_STEPS) * 32));
#pragma unroll
                        for (int m = 0; m < M; ++m) {
                            multiply_add<T>(scores[2 * j][m], a[m], b[0], b[1]);
                            multiply_add<T>(scores[2 * j + 1][m], a[m], b[2], b[3]);
                        }
                    }
                }
            }

            // To those who exponentiate.
#pragma unroll
            for (int n = 0; n < N; ++n) {
                if (F::SENT < N ? n < F::OWN : owner && n == 0) continue;
#pragma unroll
                for (int m = 0; m < M; ++m)
                    partial_scores[partial_at(member, n - (N - F::SENT), m)] =
                        make_float4(scores[n][m][0], scores[n][m][1], scores[n][m][2], scores[n][m][3]);
            }
            group_barrier();
            float largest[M][2], added[M][2] = {};
            // 8-bit: of a warp's own tokens. Exponentials times scales meet the values, so the base is one for these.
            float4 scales[F::OWN][2];
            float raised[F::OWN][2];
            bool behind = false;
#pragma unroll
            for (int m = 0; m < M; ++m) largest[m][0] = largest[m][1] = -CUDART_INF_F;
            // Store the exponentials of a warp's own tokens, as fragments A.
            auto exponentiate = [&] {
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    float powers[F::OWN][4];
                    added[m][0] = added[m][1] = 0.f;
#pragma unroll
                    for (int n = 0; n < F::OWN; ++n)
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
#pragma unroll
                            for (int i = 0; i < 2; ++i)
                                powers[n][2 * j + i] = fast_exp2(scores[n][m][2 * j + i] - base[m][j]);
                            added[m][j] += powers[n][2 * j] + powers[n][2 * j + 1];
                        }
                    // In units of 8 tokens.
                    const int at = half * N + depth * F::OWN;
                    char* const to = shares + (m * (TILE / 16) + at / 2) * 512;
#pragma unroll
                    for (int kind = 0; kind < F::KINDS; ++kind) {
                        unsigned pairs[F::OWN][2];
#pragma unroll
                        for (int n = 0; n < F::OWN; ++n) {
                            float low = 1.f, high = 1.f;
                            if constexpr (FP8)
                                low = component(scales[n][0], kind), high = component(scales[n][1], kind);
#pragma unroll
                            for (int j = 0; j < 2; ++j)
                                if constexpr (FP8)
                                    pairs[n][j] = pack<__half>(powers[n][2 * j] * low, powers[n][2 * j + 1] * high);
                                else
                                    pairs[n][j] = pack<T>(powers[n][2 * j], powers[n][2 * j + 1]);
                        }
                        if constexpr (F::OWN == 2)
                            *reinterpret_cast<uint4*>(to + kind * F::KIND_BYTES) =
                                make_uint4(pairs[0][0], pairs[0][1], pairs[F::OWN - 1][0], pairs[F::OWN - 1][1]);
                        else
                            *reinterpret_cast<uint2*>(to + kind * F::KIND_BYTES + at % 2 * 8) =
                                make_uint2(pairs[0][0], pairs[0][1]);
                    }
                }
            };
            if (owner) {
#pragma unroll
                for (int other = 1; other < F::DEPTHS; ++other) {
                    const int sender = (depth + other) % F::DEPTHS;
#pragma unroll
                    for (int n = 0; n < F::OWN; ++n) {
                        // What is this warp's n-th is another one of the sender's.
                        const int sent = ((depth - sender) * F::OWN + n) & (N - 1);
#pragma unroll
                        for (int m = 0; m < M; ++m) {
                            const float4 four =
                                partial_scores[partial_at(half * F::DEPTHS + sender, sent - (N - F::SENT), m)];
                            scores[n][m][0] += four.x, scores[n][m][1] += four.y;
                            scores[n][m][2] += four.z, scores[n][m][3] += four.w;
                        }
                    }
                }
#pragma unroll
                for (int n = 0; n < F::OWN; ++n)
#pragma unroll
                    for (int m = 0; m < M; ++m)
#pragma unroll
                        for (int i = 0; i < 4; ++i) scores[n][m][i] *= p.scale_log2;
                if constexpr (FP8) {
#pragma unroll
                    for (int n = 0; n < F::OWN; ++n)
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            const int t = (depth * F::OWN + n) * 8 + pair * 2 + i;
                            scales[n][i] = *reinterpret_cast<const float4*>(tile + t * F::PITCH + F::LATENT);
                            raised[n][i] = exponent_of(scales[n][i]);
                        }
                }
                if (arrival.valid != ALL_VALID || (p.causal && token + TILE > all_see)) {
#pragma unroll
                    for (int n = 0; n < F::OWN; ++n)
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            const int t = (half * N + depth * F::OWN + n) * 8 + pair * 2 + i;
                            const bool there = arrival.valid >> (t / F::COPIED * (64 / F::COPIERS) + t % F::COPIED) & 1;
#pragma unroll
                            for (int m = 0; m < M; ++m)
#pragma unroll
                                for (int j = 0; j < 2; ++j)
                                    if (!there ||
                                        (p.causal &&
                                         token + t >= causal_end(p, visit.length, group_row + m * 16 + j * 8 + row)))
                                        scores[n][m][2 * j + i] = -CUDART_INF_F;
                        }
                }
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
#pragma unroll
                        for (int n = 0; n < F::OWN; ++n)
#pragma unroll
                            for (int i = 0; i < 2; ++i)
                                largest[m][j] =
                                    fmaxf(largest[m][j], scores[n][m][2 * j + i] + (FP8 ? raised[n][i] : 0.f));
                        largest[m][j] = lanes_max<4>(largest[m][j]);
                        behind |= largest[m][j] > base[m][j] + BASE_LAG;
                    }
                exponentiate();
            }
            bad |= arrival.bad != 0;
            if (named_barrier_any(1 + group, F::MEMBERS * 32, behind)) {
                if (pair == 0)
#pragma unroll
                    for (int m = 0; m < M; ++m)
#pragma unroll
                        for (int j = 0; j < 2; ++j)
                            maxima[member * F::GROUP_ROWS + m * 16 + j * 8 + row] = largest[m][j];
                group_barrier();
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        // A row that has seen nothing yet has accumulated nothing, and keeps a finite base.
                        float follows = base[m][j];
#pragma unroll
                        for (int i = 0; i < F::MEMBERS; ++i)
                            follows = fmaxf(follows, maxima[i * F::GROUP_ROWS + m * 16 + j * 8 + row]);
                        const float fade = fast_exp2(base[m][j] - follows);
                        base[m][j] = follows;
                        sum[m][j] *= fade;
#pragma unroll
                        for (int n = 0; n < V; ++n) out[m][n][2 * j] *= fade, out[m][n][2 * j + 1] *= fade;
                    }
                if (owner) exponentiate();
                group_barrier();
            }
#pragma unroll
            for (int m = 0; m < M; ++m) sum[m][0] += added[m][0], sum[m][1] += added[m][1];

            // The second product. All steps at once would spill registers of 64 rows.
            constexpr int STEPS_AT_ONCE = M > 1 && !FP8 && __CUDA_ARCH__ < 900 ? 1 : TILE / 16;
#pragma unroll STEPS_AT_ONCE
            for (int step = 0; step < TILE / 16; ++step) {
                unsigned a[M][4];
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    const uint4 four = *reinterpret_cast<const uint4*>(shares + (FP8 ? member * F::KIND_BYTES : 0) +
                                                                       (m * (TILE / 16) + step) * 512);
                    a[m][0] = four.x, a[m][1] = four.y, a[m][2] = four.z, a[m][3] = four.w;
                }
                const unsigned tokens_at = tile_at + step * 16 * F::PITCH;
#pragma unroll
                for (int n = 0; FP8 && n < V; n += 4) {
                    unsigned words[4];
                    load_transposed(words, tokens_at + of_columns + n * 8);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        // Of two tokens each, first the number in the even column, then in the odd one.
                        unsigned low[2], high[2];
                        to_halves<__nv_fp8_e4m3>(low, __byte_perm(words[2 * i], 0, 0x3120));
                        to_halves<__nv_fp8_e4m3>(high, __byte_perm(words[2 * i + 1], 0, 0x3120));
#pragma unroll
                        for (int odd = 0; odd < 2; ++odd)
#pragma unroll
                            for (int m = 0; m < M; ++m)
                                multiply_add<__half>(out[m][min(n + 2 * i + odd, V - 1)], a[m], low[odd], high[odd]);
                    }
                }
#pragma unroll
                for (int n = 0; !FP8 && n < V; n += 2) {
                    if (!DIM_V && F::column_of(member, n) >= head_dim_v) continue;
                    unsigned b[4];
                    if (n < F::LINE_V)
                        load_transposed(b, ((tokens_at + of_columns) ^ n % 8 * 16) + n / 8 * 128);
                    else
                        load_transposed(b, tokens_at + F::chunk_at(lane % 16, F::column_of(member, n) / 8));
#pragma unroll
                    for (int m = 0; m < M; ++m) {
                        multiply_add<T>(out[m][n], a[m], b[0], b[1]);
                        if (n + 1 < V) multiply_add<T>(out[m][min(n + 1, V - 1)], a[m], b[2], b[3]);
                    }
                }
            }

            if constexpr (F::APART) {
                __syncwarp();
                if (lane == 0) barrier_arrive(empty(stage));
                if (copies) {
                    if (ahead.more) barrier_wait(empty(stage), phase);
                    copy_tile(stage);
                }
            }
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }

#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float mine = lanes_sum<4>(sum[m][j]);
                const int at = member * F::GROUP_ROWS + m * 16 + j * 8 + row;
                if (pair == 0) {
                    sums[at] = F::RINGS == 2 && bad ? CUDART_NAN_F : mine;
                    if constexpr (F::RINGS == 2) maxima[at] = base[m][j];
                }
            }
        if constexpr (F::RINGS == 2) {
            both_groups();
            float total[2], fades[2][2]; // of the groups
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                constexpr int GROUP = F::MEMBERS * F::GROUP_ROWS;
                const int at = j * 8 + row;
                const float* const all_sums = sums - group * GROUP;
                const float* const bases = maxima - group * GROUP;
                const float highest = fmaxf(bases[at], bases[GROUP + at]);
                total[j] = 0.f;
#pragma unroll
                for (int g = 0; g < 2; ++g) {
                    fades[g][j] = fast_exp2(bases[g * GROUP + at] - highest);
#pragma unroll
                    for (int i = 0; i < F::MEMBERS; ++i)
                        total[j] += all_sums[g * GROUP + i * F::GROUP_ROWS + at] * fades[g][j];
                }
                base[0][j] = highest;
            }
            float4* const given = reinterpret_cast<float4*>(shared + F::PARTIAL_SCORES) + member * 32 + lane;
#pragma unroll
            for (int start = 0; start < V; start += F::GIVEN) {
#pragma unroll
                for (int n = start; n < start + F::GIVEN; ++n)
                    if (group == 1)
                        given[(n - start) * F::MEMBERS * 32] =
                            make_float4(out[0][n][0], out[0][n][1], out[0][n][2], out[0][n][3]);
                both_groups();
#pragma unroll
                for (int n = start; n < start + F::GIVEN; ++n)
                    if (group == 0) {
                        const float4 four = given[(n - start) * F::MEMBERS * 32];
                        const float others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            out[0][n][i] = out[0][n][i] * fades[0][i / 2] + others[i] * fades[1][i / 2];
                    }
                both_groups();
            }
            if (group == 0) {
                const Part again(p, blockIdx.z);
                const Visit visited(p, again, sequence);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const Destination<T> to(p, again, visited, kv_head, first_row + j * 8 + row, base[0][j], total[j],
                                            false, member == 0 && pair == 0);
                    to.template store_interleaved<V>(out[0], j, F::column_of(member, 0));
                }
            }
        } else {
            group_barrier();
            // Found once more, so as not to take registers all the while.
            const Part again(p, blockIdx.z);
            const Visit visited(p, again, sequence);
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float total = 0.f;
#pragma unroll
                    for (int i = 0; i < F::MEMBERS; ++i) total += sums[i * F::GROUP_ROWS + m * 16 + j * 8 + row];
                    const Destination<T> to(p, again, visited, kv_head, group_row + m * 16 + j * 8 + row, base[m][j],
                                            total, bad, member == 0 && pair == 0);
                    if constexpr (FP8) {
                        to.template store_interleaved<V>(out[m], j, F::column_of(member, 0));
                    } else {
                        to.template store<F::LINE_V, DIM_V>(p, out[m], j, F::column_of(member, 0));
                        if constexpr (F::REST_V)
                            to.template store<F::REST_V, DIM_V>(p, out[m] + F::LINE_V, j,
                                                                F::column_of(member, F::LINE_V));
                    }
                }
        }
    }
}
