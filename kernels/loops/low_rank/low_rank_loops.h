// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

// Compiled once for each instruction set, by the sources beside it. `Isa` is a type of the source's own: without it the
// linker would take the loops of one source for all.
//
// Sums are made in vectors of 64 bytes, whatever the registers are, and every operation is rounded by itself: the bits
// are the same on every processor, and those of a matrix do not depend on where it lies.
namespace bagua::low_rank {

// A matrix, rows * columns, and the columns of its factors one after another.
template <class T>
struct Arguments {
  T* values;
  // May be null.
  float* residual;
  int64_t rows;
  int64_t columns;
  int64_t rank;
};

template <class T>
struct MatrixLoops {
  // values += residual;  P = values Q.
  void (*multiply)(const Arguments<T>&, const T* q, T* p);
  // Q = values^T P.
  void (*multiplyTransposed)(const Arguments<T>&, const T* p, T* q);
  // residual = values - P Q^T, where that is finite and `keepsRest`;  values = P Q^T.
  void (*replace)(const Arguments<T>&, const T* p, const T* q, bool keepsRest);
};

struct Loops {
  const char* name;
  MatrixLoops<float> ofFloat;
  MatrixLoops<double> ofDouble;
};

const Loops& scalarLoops();
#if defined(__x86_64__)
const Loops& avx2Loops();
const Loops& avx512Loops();
#endif
// What this machine can run, the fastest last.
const std::vector<const Loops*>& availableLoops();

template <class Isa, class T>
struct WideVector {
  static constexpr int64_t kCount = 64 / sizeof(T);
  using Vector [[gnu::vector_size(64)]] = T;
  using Halves [[gnu::vector_size(kCount * sizeof(float))]] = float;

  [[gnu::always_inline]] static void load(Vector& vector, const T* from) { std::memcpy(&vector, from, sizeof(vector)); }
  [[gnu::always_inline]] static void store(const Vector& vector, T* to) { std::memcpy(to, &vector, sizeof(vector)); }

  // values += residual.
  [[gnu::always_inline]] static void addTo(Vector& vector, const float* residual, T* values) {
    Halves rest;
    std::memcpy(&rest, residual, sizeof(rest));
    vector += __builtin_convertvector(rest, Vector);
    store(vector, values);
  }

  [[gnu::always_inline]] static T total(const Vector& vector) {
    std::array<T, kCount> sums;
    std::memcpy(sums.data(), &vector, sizeof(vector));
    for (int64_t half = kCount / 2; half > 0; half /= 2) {
      for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    return sums[0];
  }
};

// The last columns, fewer than a vector has elements, with zeros behind them, so that loops need no other form for
// them.
template <class Isa, class T>
[[gnu::always_inline]] inline void loadTail(typename WideVector<Isa, T>::Vector& vector, const T* from, int64_t count) {
  vector = typename WideVector<Isa, T>::Vector{};
  std::memcpy(&vector, from, count * sizeof(T));
}

template <class Isa, class T, int kRows, int kRank, bool kAddsResidual>
void multiplyBlock(const Arguments<T>& matrix, const T* q, T* p, int64_t row) {
  using L = WideVector<Isa, T>;
  using Vector = typename L::Vector;
  Vector sums[kRows][kRank] = {};
  const int64_t whole = matrix.columns / L::kCount * L::kCount;
  for (int64_t j = 0; j < whole; j += L::kCount) {
    Vector factors[kRank];
#pragma GCC unroll 8
    for (int k = 0; k < kRank; ++k) L::load(factors[k], q + k * matrix.columns + j);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const int64_t place = (row + i) * matrix.columns + j;
      Vector value;
      L::load(value, matrix.values + place);
      if constexpr (kAddsResidual) L::addTo(value, matrix.residual + place, matrix.values + place);
#pragma GCC unroll 8
      for (int k = 0; k < kRank; ++k) sums[i][k] += value * factors[k];
    }
  }
  if (const int64_t count = matrix.columns - whole; count > 0) {
    Vector factors[kRank];
#pragma GCC unroll 8
    for (int k = 0; k < kRank; ++k) loadTail<Isa, T>(factors[k], q + k * matrix.columns + whole, count);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const int64_t place = (row + i) * matrix.columns + whole;
      if constexpr (kAddsResidual) {
        for (int64_t j = place; j < place + count; ++j) matrix.values[j] += static_cast<T>(matrix.residual[j]);
      }
      Vector value;
      loadTail<Isa, T>(value, matrix.values + place, count);
#pragma GCC unroll 8
      for (int k = 0; k < kRank; ++k) sums[i][k] += value * factors[k];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int k = 0; k < kRank; ++k) p[k * matrix.rows + row + i] = L::total(sums[i][k]);
  }
}

// Calls block<kRank>(k) for columns k to k + kRank of the factors: their sums stay in registers, and the rows in a
// cache.
template <class Block>
void inBlocksOfColumns(int64_t rank, Block&& block) {
  int64_t k = 0;
  for (; rank - k >= 4; k += 4) block.template operator()<4>(k);
  if (rank - k >= 2) {
    block.template operator()<2>(k);
    k += 2;
  }
  if (rank - k >= 1) block.template operator()<1>(k);
}

template <class Isa, class T, int kRows>
void multiplyRows(const Arguments<T>& matrix, const T* q, T* p, int64_t row) {
  inBlocksOfColumns(matrix.rank, [&]<int kRank>(int64_t k) {
    // The first block's values are those of all.
    if (k == 0 && matrix.residual != nullptr) {
      multiplyBlock<Isa, T, kRows, kRank, true>(matrix, q, p, row);
    } else {
      multiplyBlock<Isa, T, kRows, kRank, false>(matrix, q + k * matrix.columns, p + k * matrix.rows, row);
    }
  });
}

template <class Isa, class T>
void multiplyLoop(const Arguments<T>& matrix, const T* q, T* p) {
  constexpr int kRows = 4;
  int64_t row = 0;
  for (; row + kRows <= matrix.rows; row += kRows) multiplyRows<Isa, T, kRows>(matrix, q, p, row);
  for (; row < matrix.rows; ++row) multiplyRows<Isa, T, 1>(matrix, q, p, row);
}

template <class Isa, class T, int kRows, int kRank>
void transposedBlock(const Arguments<T>& matrix, const T* p, T* q, int64_t row) {
  using L = WideVector<Isa, T>;
  using Vector = typename L::Vector;
  T factors[kRows][kRank];
  for (int i = 0; i < kRows; ++i) {
    for (int k = 0; k < kRank; ++k) factors[i][k] = p[k * matrix.rows + row + i];
  }
  const int64_t whole = matrix.columns / L::kCount * L::kCount;
  for (int64_t j = 0; j < whole; j += L::kCount) {
    Vector sums[kRank] = {};
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      Vector value;
      L::load(value, matrix.values + (row + i) * matrix.columns + j);
#pragma GCC unroll 8
      for (int k = 0; k < kRank; ++k) sums[k] += value * factors[i][k];
    }
#pragma GCC unroll 8
    for (int k = 0; k < kRank; ++k) {
      Vector before;
      L::load(before, q + k * matrix.columns + j);
      L::store(before + sums[k], q + k * matrix.columns + j);
    }
  }
  for (int k = 0; k < kRank; ++k) {
    for (int64_t j = whole; j < matrix.columns; ++j) {
      T sum = 0;
      for (int i = 0; i < kRows; ++i) sum += matrix.values[(row + i) * matrix.columns + j] * factors[i][k];
      q[k * matrix.columns + j] += sum;
    }
  }
}

template <class Isa, class T, int kRows>
void transposedRows(const Arguments<T>& matrix, const T* p, T* q, int64_t row) {
  inBlocksOfColumns(matrix.rank, [&]<int kRank>(int64_t k) {
    transposedBlock<Isa, T, kRows, kRank>(matrix, p + k * matrix.rows, q + k * matrix.columns, row);
  });
}

template <class Isa, class T>
void transposedLoop(const Arguments<T>& matrix, const T* p, T* q) {
  constexpr int kRows = 8;
  std::fill_n(q, matrix.rank * matrix.columns, T(0));
  int64_t row = 0;
  for (; row + kRows <= matrix.rows; row += kRows) transposedRows<Isa, T, kRows>(matrix, p, q, row);
  for (; row < matrix.rows; ++row) transposedRows<Isa, T, 1>(matrix, p, q, row);
}

template <class Isa, class T, int kRows, bool kKeepsRest>
void replaceRows(const Arguments<T>& matrix, const T* p, const T* q, int64_t row) {
  using L = WideVector<Isa, T>;
  using Vector = typename L::Vector;
  constexpr float kLargest = std::numeric_limits<float>::max();
  const auto at = [&](int i, int64_t j) { return (row + i) * matrix.columns + j; };
  const int64_t whole = matrix.columns / L::kCount * L::kCount;
  for (int64_t j = 0; j < whole; j += L::kCount) {
    Vector products[kRows];
    Vector factors;
    L::load(factors, q + j);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) products[i] = factors * p[row + i];
    for (int64_t k = 1; k < matrix.rank; ++k) {
      L::load(factors, q + k * matrix.columns + j);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) products[i] += factors * p[k * matrix.rows + row + i];
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      T* const values = matrix.values + at(i, j);
      if constexpr (kKeepsRest) {
        float* const residual = matrix.residual + at(i, j);
        typename L::Halves before;
        std::memcpy(&before, residual, sizeof(before));
        Vector rest;
        L::load(rest, values);
        const auto after = __builtin_convertvector(rest - products[i], typename L::Halves);
        // Of a NaN neither is true.
        const typename L::Halves kept = ((after <= kLargest) & (after >= -kLargest)) ? after : before;
        std::memcpy(residual, &kept, sizeof(kept));
      }
      L::store(products[i], values);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int64_t j = whole; j < matrix.columns; ++j) {
      T product = p[row + i] * q[j];
      for (int64_t k = 1; k < matrix.rank; ++k) product += p[k * matrix.rows + row + i] * q[k * matrix.columns + j];
      T& value = matrix.values[at(i, j)];
      if constexpr (kKeepsRest) {
        float& residual = matrix.residual[at(i, j)];
        const auto after = static_cast<float>(value - product);
        if (after <= kLargest && after >= -kLargest) residual = after;
      }
      value = product;
    }
  }
}

template <class Isa, class T, bool kKeepsRest>
void replaceAll(const Arguments<T>& matrix, const T* p, const T* q) {
  constexpr int kRows = 4;
  int64_t row = 0;
  for (; row + kRows <= matrix.rows; row += kRows) replaceRows<Isa, T, kRows, kKeepsRest>(matrix, p, q, row);
  for (; row < matrix.rows; ++row) replaceRows<Isa, T, 1, kKeepsRest>(matrix, p, q, row);
}

template <class Isa, class T>
void replaceLoop(const Arguments<T>& matrix, const T* p, const T* q, bool keepsRest) {
  if (matrix.residual != nullptr && keepsRest) {
    replaceAll<Isa, T, true>(matrix, p, q);
  } else {
    replaceAll<Isa, T, false>(matrix, p, q);
  }
}

template <class Isa>
constexpr Loops loopsOf(const char* name) {
  return {name,
          {multiplyLoop<Isa, float>, transposedLoop<Isa, float>, replaceLoop<Isa, float>},
          {multiplyLoop<Isa, double>, transposedLoop<Isa, double>, replaceLoop<Isa, double>}};
}

}  // namespace bagua::low_rank
