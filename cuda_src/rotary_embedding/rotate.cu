// Rotate the heads of queries and keys by their positions, in place.
//
//   first(j), second(j) = x[j], x[j + rotary_dim / 2]      layout HALVES
//                         x[2 * j], x[2 * j + 1]           layout PAIRS
//   first'  = first * cos[t, j] - second * sin[t, j]
//   second' = second * cos[t, j + second_half] + first * sin[t, j + second_half]
//
// for each head x of token t and each j < rotary_dim / 2, in float32, rounded once to T. The other elements of a head
// do not change. The input has layout LOADED, the output layout STORED.
//
// Grid: a thread handles COUNT consecutive values of j (16 bytes of T, or one element) in one head, and `head_threads`
// threads share a head. If the layouts differ, a thread writes to addresses that other threads of the block read, so
// all threads load before the first store.
//
// Speed of light: memory bandwidth; cos and sin are read from memory once per token. A decoding step is bound by the
// latency of a launch and a load.
#include "common/overlap.cuh"
#include "rotary_embedding/layout.cuh"

constexpr int THREADS = 256;

// An array [batch, heads, tokens, head_dim] with arbitrary strides.
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
    Divisor by_heads;
    Divisor by_tokens;
    Divisor by_threads;
    int rows; // heads of all tokens, of query and key
    int all_heads;
    int query_heads;
    int tokens; // per batch entry
    int head_threads;
    int half;        // rotary_dim / 2
    int second_half; // column of cos and sin for second(0); 0: as for first(0)
};

// Without this minimum of four resident blocks per multiprocessor, the compiler spills 8 bytes on sm_120a.
template <typename T, typename C, int COUNT, int LOADED, int STORED>
__global__ void __launch_bounds__(THREADS, 4) rotary_embedding(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    const int row_in_block = p.by_threads.quotient(threadIdx.x), block_rows = p.by_threads.quotient(THREADS);
    const int vector = threadIdx.x - row_in_block * p.head_threads, row = blockIdx.x * block_rows + row_in_block;
    const bool active = row_in_block < block_rows && row < p.rows;
    Elements<T, COUNT> x[2], y[2];
    char* head = nullptr;
    if (active) {
        const int token = p.by_heads.quotient(row), batch = p.by_tokens.quotient(token);
        const int token_head = row - token * p.all_heads, batch_token = token - batch * p.tokens;
        const bool is_key = token_head >= p.query_heads;
        const Heads heads = is_key ? p.key : p.query;
        head = heads.first + batch * heads.batch_stride + batch_token * heads.token_stride +
               (token_head - (is_key ? p.query_heads : 0)) * heads.head_stride;
        x[0].load(head + offset_of<T, COUNT, LOADED>(vector, 0, p.half));
        x[1].load(head + offset_of<T, COUNT, LOADED>(vector, 1, p.half));
        const int first = vector * COUNT * int(sizeof(C)), second = first + p.second_half * int(sizeof(C));
        const char* const cos = p.cos + batch * p.cos_batch_stride + batch_token * p.cos_token_stride;
        const char* const sin = p.sin + batch * p.sin_batch_stride + batch_token * p.sin_token_stride;
        Elements<C, COUNT> cos_of[2], sin_of[2];
        cos_of[0].load_readonly(cos + first), sin_of[0].load_readonly(sin + first);
        cos_of[1].load_readonly(cos + second), sin_of[1].load_readonly(sin + second);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int a = pair_element<COUNT, LOADED>(i, 0), b = pair_element<COUNT, LOADED>(i, 1);
            const float one = x[a / COUNT].get(a % COUNT), two = x[b / COUNT].get(b % COUNT);
            // No fused multiply-add, so that every machine gives the bits of the NumPy reference.
            const float left = __fsub_rn(__fmul_rn(one, cos_of[0].get(i)), __fmul_rn(two, sin_of[0].get(i)));
            const float right = __fadd_rn(__fmul_rn(two, cos_of[1].get(i)), __fmul_rn(one, sin_of[1].get(i)));
            const int c = pair_element<COUNT, STORED>(i, 0), d = pair_element<COUNT, STORED>(i, 1);
            y[c / COUNT].set(c % COUNT, left), y[d / COUNT].set(d % COUNT, right);
        }
    }
    if constexpr (LOADED != STORED) __syncthreads();
    if (!active) return;
    y[0].store(head + offset_of<T, COUNT, STORED>(vector, 0, p.half));
    y[1].store(head + offset_of<T, COUNT, STORED>(vector, 1, p.half));
}
