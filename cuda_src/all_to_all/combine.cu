// Send the experts' output rows over NVLink back to the ranks that own the tokens, and sum them there.
//
//   partial[d, t] = sum over the slots s of token t on rank d, in order, of weights[s] * src[inverse[s]]
//   out[t]        = sum over the ranks d that have an expert of token t, in order, of partial[d, t]
//
// A slot is one (token, expert) pair: a token has `topk` slots. Sums are in float32, and `partial` is rounded to T
// before it is sent. The sums have a fixed order, so the bits of the result do not depend on the order in which the
// data arrives. MODE: with SUMMED the caller has computed `partial`; with BY_SLOT this kernel computes it. With APART
// there is no `partial`: each slot's row is sent separately, and `out[t]` is the sum of `weights[s] * src[inverse[s]]`
// over all slots of the token, in order. The result of APART has the same bits for any number of ranks.
//
// Grid: blocks of 256 threads, all resident. A block handles one chunk (a part of a token's row) at a time. The source
// of a token is the rank that owns it. The first `senders` blocks handle the tokens of other ranks: they store each
// chunk into the source's window (its memory that all ranks can write to), and then set a flag there. For a source with
// few tokens they send lines instead, which need no flags (all_to_all/lines.cuh). The other blocks handle this rank's
// own tokens: they compute this rank's contribution, wait for the contributions of the other ranks, and add them.
//
// Speed of light: with many tokens the limit is the bandwidth to the peers; each token's row crosses NVLink once per
// other rank that contributes to it. With few tokens the limit is the latency of a store to a peer. On two H200s, with
// rows of 7168 bfloat16, 4096 tokens per rank take 186 us with SUMMED, which is 86% of the bandwidth of plain stores to
// the peer, and 253 us with BY_SLOT. 128 tokens take 11.1 us (SUMMED) and 12.9 us (BY_SLOT); 8 tokens take 4.5 us and
// 5.6 us.
#include "all_to_all/contribution.cuh"
#include "all_to_all/writer.cuh"

// Return the index of a received row in the window of the token's source (the rank that owns the token). `part` is the
// slot if APART, else the rank that sends the row.
template <int MODE> __device__ __forceinline__ long long row_of(const Params& p, int token, int part) {
    return MODE == APART ? (long long)token * p.topk + part : (long long)part * p.max_tokens + token;
}

// Return the flags that belong to a chunk of a row, in the window of `rank`.
template <int UNITS>
__device__ __forceinline__ Flags<UNITS> flags_of(const Params& p, int rank, long long row, int chunk) {
    return {reinterpret_cast<unsigned*>(p.ranks.windows[rank] + p.flags_at) + row * p.flags +
            chunk * (UNITS / FLAG_UNITS)};
}

// Return the address of a lane's i-th line in the source's window, for a chunk of the contribution of `rank` to
// `token`. Return null past the end of the row.
template <int UNITS>
__device__ __forceinline__ char* line_at(const Params& p, int source, int token, int rank, int chunk, int i) {
    const int line = chunk * (UNITS * LINES_AT_ONCE) + line_of(i);
    const long long row = (long long)rank * p.line_tokens + token;
    return line < p.lines ? p.ranks.windows[source] + p.lines_at + (row * p.lines + line) * LINE_BYTES : nullptr;
}

// Work item of a sending block: one chunk (a part of a row) to send to the source of a token. With APART, the chunk
// belongs to the row of one slot of the token.
struct Job {
    unsigned number;
    int source, token, part, chunk;
    Slots slots;

    __device__ __forceinline__ long long place(const Params& p) const {
        return (long long)source * p.max_tokens + token;
    }

    // Return a mask of the slots whose rows this job sends.
    template <int MODE> __device__ __forceinline__ unsigned which(const Params& p) const {
        const unsigned here = slots.here(p);
        return MODE == APART ? here & 1u << part : here;
    }
};

// Return job `number`; a job is one chunk to send. Consecutive jobs have different sources, and each rank begins with a
// different source, so that the ranks do not all send to the same rank at the same time.
template <int MODE> __device__ __forceinline__ Job job_of(const Params& p, unsigned number) {
    const unsigned others = p.ranks.ranks - 1;
    Job job = {number};
    job.chunk = number % p.chunks, number /= p.chunks;
    job.part = p.ranks.rank;
    if (MODE == APART) job.part = number % p.topk, number /= p.topk;
    job.source = (p.ranks.rank + 1 + number % others) % p.ranks.ranks;
    job.token = number / others;
    // The arrays have space for max_tokens tokens of each source, so these loads are valid before the source's number
    // of tokens is known.
    if (job.token < p.max_tokens) job.slots = Slots::load<MODE>(p, job.place(p));
    return job;
}

// Send this block's share of the chunks for tokens of other ranks.
template <typename T, int MODE, int UNITS>
__device__ __forceinline__ void send(const Params& p, unsigned long long step) {
    __shared__ alignas(128) uint4 staged[STAGES][CHUNK<UNITS>];
    const unsigned epoch = unsigned(step + 1);
    Job next = job_of<MODE>(p, blockIdx.x);
    const int* const tokens = p.ranks.progress->tokens;
    int most = 0;
    for (int rank = 0; rank < p.ranks.ranks; ++rank)
        if (rank != p.ranks.rank) most = max(most, tokens[rank]);
    const unsigned end = most * (p.ranks.ranks - 1) * (MODE == APART ? p.topk : 1) * p.chunks;
    ChunkWriter<UNITS> writer(staged, epoch);
    while (next.number < end) {
        const Job job = next;
        const unsigned which = job.which<MODE>(p);
        next = {job.number + p.senders};
        if (next.number < end) next = job_of<MODE>(p, next.number);
        if (job.token >= tokens[job.source] || !which) continue;
        const int first = job.chunk * CHUNK<UNITS>;
        uint4 value[UNITS];
        contribution<T, MODE>(value, p, job.slots, which, job.place(p), first);
        // If a row is missing, stop before the flags are set, so that no receiver reads an incomplete row. `have_rows`
        // has reported the failure to all ranks.
        if (MODE != SUMMED && __syncthreads_or(!job.slots.have_rows<MODE>(p, which, step))) break;
        if (MODE != APART && tokens[job.source] <= p.line_tokens) {
#pragma unroll
            for (int i = 0; i < UNITS; ++i)
                if (char* const line = line_at<UNITS>(p, job.source, job.token, job.part, job.chunk, i))
                    store_line(line, value[i], epoch);
        } else {
            char* const window = p.ranks.windows[job.source];
            const long long row = row_of<MODE>(p, job.token, job.part);
            writer.write(reinterpret_cast<uint4*>(window + p.partial_at) + row * p.units + first, value,
                         min(CHUNK<UNITS>, p.units - first), flags_of<UNITS>(p, job.source, row, job.chunk));
        }
    }
    writer.finish();
}

// The summands ("parts") of a token of this rank. A part is a slot if APART, else the contribution of a rank. Bit i of
// a mask stands for slot i or rank i.
struct Parts {
    unsigned all, own; // all: all parts; own: the parts that this rank computes
    int rank;          // in lane i, the rank of part i
    float weight;      // in lane i, the weight of slot i if APART, else 1
};

// Work item of a receiving block (a "piece"): one chunk of the output of a token of this rank.
struct Piece {
    unsigned number;
    int token, chunk;
    int id = -1;        // in lane k, the expert of slot k
    float weight = 1.f; // in lane k, the weight of slot k; APART only
    Slots slots;        // the row and weight of each slot, if its expert is on this rank

    // Issue the loads of piece `number`, one chunk of the output. The first use of a loaded value waits for its load.
    template <int MODE, typename ID> static __device__ __forceinline__ Piece load(const Params& p, unsigned number) {
        Piece piece = {number, int(number / p.chunks), int(number % p.chunks)};
        if (piece.token >= p.tokens) return piece;
        const int lane = threadIdx.x % 32;
        if (lane < p.topk) {
            const long long at = (long long)piece.token * p.topk + lane;
            const ID id = static_cast<const ID*>(p.topk_ids)[at];
            // Range-check a 64-bit id here, because keeping all 64 bits takes more registers.
            piece.id = sizeof(ID) == sizeof(int) || id < ID(p.ranks.experts) ? int(id) : -1;
            if (MODE == APART && p.weighted) piece.weight = p.weights[at];
        }
        piece.slots = Slots::load<MODE>(p, (long long)p.ranks.rank * p.max_tokens + piece.token);
        return piece;
    }

    template <int MODE> __device__ __forceinline__ Parts parts(const Params& p) const {
        const int owner = p.ranks.owner(unsigned(id));
        if constexpr (MODE == APART)
            return {__ballot_sync(FULL_WARP, owner >= 0), __ballot_sync(FULL_WARP, owner == p.ranks.rank), owner,
                    weight};
        const unsigned all = __reduce_or_sync(FULL_WARP, owner >= 0 ? 1u << owner : 0u);
        return {all, all & 1u << p.ranks.rank, int(threadIdx.x % 32), 1.f};
    }
};

// Wait until the flags of a chunk are set for all rows that other ranks send for a token. Return whether all these
// chunks arrived; the result is the same in all lanes.
template <int MODE, int UNITS>
__device__ __forceinline__ bool wait_for_chunk(const Params& p, const Parts& parts, int token, int chunk,
                                               unsigned long long step) {
    const int lane = threadIdx.x % 32, exist = p.units - chunk * CHUNK<UNITS> > CHUNK<FLAG_UNITS> ? 2 : 1;
    bool there = true;
    if ((parts.all & ~parts.own) >> lane & 1) {
        const auto flags = flags_of<UNITS>(p, p.ranks.rank, row_of<MODE>(p, token, lane), chunk);
        there = wait_for(p.ranks, parts.rank, COMBINE, step, [&] { return flags.are_set(unsigned(step + 1), exist); });
    }
    return __all_sync(FULL_WARP, there);
}

// Receive a thread's units of a chunk that was sent as lines. Return whether all of them arrived; the result is the
// same in all lanes.
template <int UNITS>
__device__ __forceinline__ bool receive_lines(uint4 (&value)[UNITS], const Params& p, int token, int rank, int chunk,
                                              unsigned long long step) {
    return wait_for<true>(p.ranks, rank, COMBINE, step, [&] {
        bool there = true;
#pragma unroll
        for (int i = 0; i < UNITS; ++i)
            if (const char* const line = line_at<UNITS>(p, p.ranks.rank, token, rank, chunk, i))
                there &= load_line(value[i], line, unsigned(step + 1));
        return __all_sync(FULL_WARP, there);
    });
}

// Compute one chunk of a token's output: compute this rank's contribution, wait for the contributions of the other
// ranks, and add all of them in order.
template <typename T, int MODE, int UNITS>
__device__ __forceinline__ void receive(const Params& p, const Piece& piece, unsigned long long step) {
    const uint4* const partial = reinterpret_cast<const uint4*>(p.ranks.windows[p.ranks.rank] + p.partial_at);
    const int token = piece.token, chunk = piece.chunk, first = chunk * CHUNK<UNITS>;
    const long long place = (long long)p.ranks.rank * p.max_tokens + token;
    const bool lines = MODE != APART && p.tokens <= p.line_tokens;
    const Parts parts = piece.parts<MODE>(p);
    const Slots& slots = piece.slots;
    const unsigned here = slots.here(p);
    bool there = slots.have_rows<MODE>(p, here, step) && !__any_sync(FULL_WARP, now(p.ranks.progress->failed));
    uint4 own[UNITS] = {};
    if (MODE != APART && parts.own) contribution<T, MODE>(own, p, slots, here, place, first);
    if (!lines && there) there = wait_for_chunk<MODE, UNITS>(p, parts, token, chunk, step);
    float sum[UNITS][8] = {};
    for (unsigned rest = parts.all; rest && there; rest &= rest - 1) {
        const int part = __ffs(rest) - 1;
        const bool is_own = parts.own >> part & 1;
        uint4 value[UNITS] = {};
        if (MODE == APART && is_own)
            contribution<T, MODE>(value, p, slots, 1u << part, place, first);
        else if (!is_own && lines)
            there = receive_lines(value, p, token, part, chunk, step);
        else if (!is_own)
            load_chunk(value, partial + row_of<MODE>(p, token, part) * p.units, first, p.units);
        const float weight = MODE == APART ? __shfl_sync(FULL_WARP, parts.weight, part) : 1.f;
#pragma unroll
        for (int i = 0; i < UNITS; ++i) add<T>(sum[i], MODE != APART && is_own ? own[i] : value[i], weight);
    }
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
        const int unit = first + unit_of(i);
#pragma unroll
        for (int n = 0; n < 8; ++n)
            if (!there) sum[i][n] = CUDART_NAN_F;
        if (has_unit() && unit < p.units)
            static_cast<uint4*>(p.out)[(long long)token * p.units + unit] = rounded<T>(sum[i]);
    }
}

// T: element type of the rows. ID: unsigned, so that a negative id compares greater than all experts.
template <typename T, typename ID, int MODE, int UNITS, int PHASES>
__global__ void __launch_bounds__(THREADS, MODE == BY_SLOT || UNITS > FLAG_UNITS ? RESIDENT_LARGE : RESIDENT)
    combine_tokens(const __grid_constant__ Params p) {
    Progress& progress = *p.ranks.progress;
    const unsigned long long step = progress.combines;
    const int senders = PHASES & SEND ? p.senders : 0;
    bool failed = false;
    if (threadIdx.x == 0) {
        failed = now(progress.failed);
        if (now(progress.buffer) != p.buffer) {
            // The last dispatch used a different buffer, so it does not belong to this combine.
            fail(p.ranks, OTHER_CALL, p.ranks.rank, COMBINE, step);
            failed = true;
        }
    }
    failed = __syncthreads_or(failed);
    if ((PHASES & RECEIVE) && threadIdx.x == THREADS - 1 && is_last(progress)) progress.combines = step + 1;
    if ((PHASES & SEND) && int(blockIdx.x) < senders) {
        if (!failed) send<T, MODE, UNITS>(p, step);
    } else if constexpr (PHASES & RECEIVE) {
        const unsigned pieces = p.tokens * p.chunks, receivers = gridDim.x - senders;
        Piece next = Piece::load<MODE, ID>(p, blockIdx.x - senders);
        while (next.number < pieces) {
            const Piece piece = next;
            // Load the next piece before waiting for the data of this piece.
            next = Piece::load<MODE, ID>(p, piece.number + receivers);
            receive<T, MODE, UNITS>(p, piece, step);
        }
    }
}
