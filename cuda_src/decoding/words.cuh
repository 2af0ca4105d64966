// Read lists of bad words and stop words.
#pragma once

// A list of words, in FasterTransformer's layout [2, size]: the tokens of all words, one word after the other; then the
// end index of each word, padded with -1.
struct Words {
    const int* ids;
    const int* ends;
    int size;

    __device__ __forceinline__ Words(const int* list, int size) : ids(list), ends(list + size), size(size) {}

    // Find the tokens of word `w`: ids[begin] to ids[end - 1]. Return false if there is no word `w`.
    __device__ __forceinline__ bool find(int w, int& begin, int& end) const {
        begin = w ? ends[w - 1] : 0;
        end = ends[w];
        return 0 <= begin && begin < end && end <= size;
    }
};

// Return whether the last `count` of the `length` tokens equal `word`.
__device__ __forceinline__ bool ends_with(const int* tokens, int length, const int* word, int count) {
    if (count > length) return false;
    for (int i = 0; i < count; ++i)
        if (tokens[length - count + i] != word[i]) return false;
    return true;
}
