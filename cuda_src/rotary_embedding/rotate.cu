// Rotate the heads of queries and keys by their positions, in place.
//
//   first(j), second(j) = x[j], x[j + rotary_dim / 2]      layout HALVES
//                         x[2 * j], x[2 * j + 1]           layout PAIRS
//   first'  = first * cos[t, j] - second * sin[t, j]
//   second' = second * cos[t, j + second_half] + first * sin[t, j + second_half]
//
// This applies to each head x of token t and each j < rotary_dim / 2. Products and sums are in float32, and each result
// is rounded once to T. The input has the layout LOADED and the output the layout STORED; the two may differ. The
// elements of a head with an index of at least rotary_dim do not change.
//
// Grid: a thread handles UNIT consecutive values of j in one head of `query` or `key`. `row_threads` threads share a
// head, and a block has as many whole heads as fit. If the two layouts differ, a thread writes to addresses that other
// threads read. Therefore all threads of a block load their elements before any thread writes.
//
// C: type of cos and sin. UNIT: values of j per thread, either as many as 16 bytes of T hold, or one.
//
// Speed of light: memory bandwidth. Each rotated element is read once and written once. Only the first head of a token
// reads cos and sin from memory; for the other heads they are in L1 or L2. A decoding step has few tokens, so its limit
// is the latency of a launch and a load.
#include "common/overlap.cuh"
#include "rotary_embedding/layout.cuh"

constexpr int THREADS = 256;

// One of the two arrays: [batch, heads, tokens, head_dim] with arbitrary strides.
struct Heads {
    char* first;
    long long batch_stride; // bytes
    long long head_stride;
    long long token_stride;
};

struct Params {
    Heads query, key;
    const char* cos; // [batch or 1, tokens, rotary_dim or rotary_dim / 2]  C
    const char* sin;
    long long cos_batch_stride, cos_token_stride; // in bytes
    long long sin_batch_stride, sin_token_stride;
    Divisor by_heads;  // heads of `query` and `key` together
    Divisor by_tokens; // tokens of a batch entry
    Divisor by_threads;
    int rows; // heads of all tokens, of query and key
    int all_heads;
    int query_heads;
    int tokens;      // of a batch entry
    int row_threads; // threads per head
    int half;        // rotary_dim / 2
    int second_half; // column of cos and sin for second(0); 0: second(j) uses the columns of first(j)
};

// The 4 asks for at least four resident blocks per multiprocessor. Without it the compiler spills 8 bytes on sm_120a.
template <typename T, typename C, int UNIT, int LOADED, int STORED>
__global__ void __launch_bounds__(THREADS, 4) rotary_embedding(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    const int slot = p.by_threads.quotient(threadIdx.x), heads_of_block = p.by_threads.quotient(THREADS);
    const int unit = threadIdx.x - slot * p.row_threads, row = blockIdx.x * heads_of_block + slot;
    const bool active = slot < heads_of_block && row < p.rows;
    Some<T, UNIT> x[2], y[2];
    char* head = nullptr;
    if (active) {
        const int token = p.by_heads.quotient(row), batch = p.by_tokens.quotient(token);
        const int of_token = row - token * p.all_heads, of_batch = token - batch * p.tokens;
        const bool is_key = of_token >= p.query_heads;
        const Heads heads = is_key ? p.key : p.query;
        head = heads.first + batch * heads.batch_stride + of_batch * heads.token_stride +
               (of_token - (is_key ? p.query_heads : 0)) * heads.head_stride;
        x[0].load(head + offset_of<T, UNIT, LOADED>(unit, 0, p.half));
        x[1].load(head + offset_of<T, UNIT, LOADED>(unit, 1, p.half));
        const int first = unit * UNIT * int(sizeof(C)), second = first + p.second_half * int(sizeof(C));
        const char* const cos = p.cos + batch * p.cos_batch_stride + of_batch * p.cos_token_stride;
        const char* const sin = p.sin + batch * p.sin_batch_stride + of_batch * p.sin_token_stride;
        Some<C, UNIT> cos_of[2], sin_of[2];
        cos_of[0].load_shared(cos + first), sin_of[0].load_shared(sin + first);
        cos_of[1].load_shared(cos + second), sin_of[1].load_shared(sin + second);
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            const int a = place_of<UNIT, LOADED>(i, 0), b = place_of<UNIT, LOADED>(i, 1);
            const float one = x[a / UNIT].get(a % UNIT), two = x[b / UNIT].get(b % UNIT);
            // Do not use a fused multiply-add: both products are rounded, as in the NumPy reference, so that every
            // machine gives the same bits.
            const float left = __fsub_rn(__fmul_rn(one, cos_of[0].get(i)), __fmul_rn(two, sin_of[0].get(i)));
            const float right = __fadd_rn(__fmul_rn(two, cos_of[1].get(i)), __fmul_rn(one, sin_of[1].get(i)));
            const int c = place_of<UNIT, STORED>(i, 0), d = place_of<UNIT, STORED>(i, 1);
            y[c / UNIT].set(c % UNIT, left), y[d / UNIT].set(d % UNIT, right);
        }
    }
    if constexpr (LOADED != STORED) __syncthreads();
    if (!active) return;
    y[0].store(head + offset_of<T, UNIT, STORED>(unit, 0, p.half));
    y[1].store(head + offset_of<T, UNIT, STORED>(unit, 1, p.half));
}
