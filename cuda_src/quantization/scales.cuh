#pragma once
#include "quantization/load.cuh"

struct Scales {
    float* out; // [experts, max_tokens, groups], with any strides
    long long expert_stride;
    long long row_stride;
    long long group_stride;
    __device__ __forceinline__ long long at(const Rows& in, int row, int group) const {
        const int expert = in.by_max_tokens.quotient(row);
        return expert * expert_stride + (row - expert * in.max_tokens) * row_stride + group * group_stride;
    }
};
