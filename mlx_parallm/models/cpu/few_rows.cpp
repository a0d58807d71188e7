// Products of few rows, y = x · Wᵀ in float32, in the place of the BLAS that MLX calls.
//
// A BLAS shares such a product among threads that meet at its end, and waits for the memory. Here
// each thread that is free takes the next few columns, and the columns after those are fetched
// meanwhile. A number of y is added up in one order, whatever the rows beside it, the threads and
// the machine's load: rows are equal to the last bit, alone and together.
//
// few_rows.py compiles this file for the processor that it runs on, and says what is used. It sets
// LEAST_WIDTH, LEAST_OUTPUTS and FEWEST_WEIGHTS of a product that is ours: smaller ones are attention's
// heads and adapters' ranks.

#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int WIDTH = 16;  // numbers of a vector
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)  // 32 vectors in registers
constexpr int ROWS = 6, ONE_ROW = 8, TWO_ROWS = 8;
#else
constexpr int ROWS = 2, ONE_ROW = 8, TWO_ROWS = 4;
#endif
constexpr int COLUMNS = 4, CHUNK = 8;   // of a tile; a chunk's is a multiple of it
constexpr int64_t LEAST_TO_SHARE = 1 << 15, LEAST_TO_WAKE = 1 << 17;  // weights of a product
constexpr int MOST_THREADS = 16;
constexpr auto SPIN = std::chrono::microseconds(100);  // about what waking a thread takes

typedef float Vector __attribute__((vector_size(WIDTH * 4)));
typedef float Unaligned __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef int32_t Lanes __attribute__((vector_size(WIDTH * 4)));
typedef void (*Gemm)(int, int, int, int, int, int, float, const float*, int, const float*, int,
                     float, float*, int);

struct Product {  // c[m, n] = alpha · a[m, k] · b[n, k]ᵀ + beta · c
  int m, n, k;
  float alpha;
  const float* a;
  int64_t lda;
  const float* b;
  int64_t ldb;
  float beta;
  float* c;
  int64_t ldc;
};

static inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Has g++ load a vector once, not again for each product with it.
#if defined(__x86_64__)
#define LOADED_ONCE(vector) asm("" : "+v"(vector))
#else
#define LOADED_ONCE(vector)
#endif
#define UNROLLED _Pragma("GCC unroll 48")  // else sums lie in memory, not in registers

// Adds the halves of each run of lanes: x's sums, then y's.
template <int RUN>
static inline Vector folded(Vector x, Vector y) {
  Lanes low, high;
  for (int i = 0; i < WIDTH; ++i) {
    low[i] = i / (RUN / 2) * RUN + i % (RUN / 2);
    high[i] = low[i] + RUN / 2;
  }
  return __builtin_shuffle(x, y, low) + __builtin_shuffle(x, y, high);
}

// Sums of N vectors, which stand in the lanes of the first ones afterwards.
template <int N, int RUN = WIDTH>
static inline __attribute__((always_inline)) void fold(Vector* sums) {
  if constexpr (RUN > 1) {
    UNROLLED for (int i = 0; i < (N + 1) / 2; ++i)
      sums[i] = folded<RUN>(sums[2 * i], sums[std::min(2 * i + 1, N - 1)]);
    fold<(N + 1) / 2, RUN / 2>(sums);
  }
}

// R rows by C columns. `next`: weights that will be read after these, or null.
template <int R, int C>
static void tile(const Product& p, int row, int column, const float* next) {
  const float *a = p.a + row * p.lda, *b = p.b + column * p.ldb;
  const int64_t lda = p.lda, ldb = p.ldb;
  Vector sums[R * C] = {};
  int k = 0;
  for (; k + WIDTH <= p.k; k += WIDTH) {
    Vector weights[C];
    UNROLLED for (int j = 0; j < C; ++j) {
      Vector loaded = *(const Unaligned*)(b + j * ldb + k);
      if (R > 1) LOADED_ONCE(loaded);
      weights[j] = loaded;
    }
    if (next)
      UNROLLED for (int j = 0; j < C; ++j) __builtin_prefetch(next + j * ldb + k);
    UNROLLED for (int i = 0; i < R; ++i) {
      Vector x = *(const Unaligned*)(a + i * lda + k);
      if (C > 1) LOADED_ONCE(x);
      UNROLLED for (int j = 0; j < C; ++j) sums[i * C + j] += x * weights[j];
    }
  }
  fold<R * C>(sums);
  float added[R * C + WIDTH];
  UNROLLED for (int i = 0; i < R * C; i += WIDTH) *(Unaligned*)(added + i) = sums[i / WIDTH];
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < C; ++j) {
      float sum = added[i * C + j];
      for (int rest = k; rest < p.k; ++rest)
        sum = __builtin_fmaf(a[i * lda + rest], b[j * ldb + rest], sum);
      float* c = p.c + (row + i) * p.ldc + column + j;
      *c = p.beta == 0 ? p.alpha * sum : __builtin_fmaf(p.alpha, sum, p.beta * *c);
    }
}

template <int R, int C>
static void rows(const Product& p, int count, int row, int column, const float* next) {
  if constexpr (R > 1)
    if (count < R) return rows<R - 1, C>(p, count, row, column, next);
  tile<R, C>(p, row, column, next);
}

// All rows of the columns [from, to).
static void compute(const Product& p, int from, int to) {
  int column = from;
  const auto after = [&](int columns) {  // the weights of the next tile
    return column + 2 * columns <= to ? p.b + (column + columns) * p.ldb : nullptr;
  };
  if (p.m == 1)  // memory's own prefetch is faster here
    for (; column + ONE_ROW <= to; column += ONE_ROW) tile<1, ONE_ROW>(p, 0, column, nullptr);
  if (p.m == 2)
    for (; column + TWO_ROWS <= to; column += TWO_ROWS)
      tile<2, TWO_ROWS>(p, 0, column, after(TWO_ROWS));
  const int tiles = (p.m + ROWS - 1) / ROWS;
  for (; column + COLUMNS <= to; column += COLUMNS)
    for (int i = 0, row = 0; i < tiles; ++i) {
      const int count = p.m / tiles + (i < p.m % tiles);
      rows<ROWS, COLUMNS>(p, count, row, column, i ? nullptr : after(COLUMNS));
      row += count;
    }
  for (; column < to; ++column)
    for (int row = 0; row < p.m; ++row) tile<1, 1>(p, row, column, nullptr);
}

// One product at a time is shared. `work` is its number, and how many of its chunks nobody has
// taken; who takes one may read the product, which stays until all chunks are done.
static std::atomic<uint64_t> work{0};
static std::atomic<uint32_t> calls{0}, done{0};
static std::atomic<int> threads{1}, asleep{0};
static std::atomic<uint64_t> helped{0};  // chunks that helpers have computed
static std::atomic_flag busy = ATOMIC_FLAG_INIT;
static Product shared;
static int chunk, started = 0;

static bool take_chunk() {
  uint64_t seen = work.load(std::memory_order_acquire);
  while (uint32_t(seen)) {
    if (!work.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) continue;
    const int from = (int(uint32_t(seen)) - 1) * chunk;
    compute(shared, from, std::min(shared.n, from + chunk));
    done.fetch_add(1, std::memory_order_release);
    return true;
  }
  return false;
}

static void* help(void* number) {
  const int which = int(intptr_t(number));
  for (;;) {
    const uint32_t seen = calls.load();
    if (which < threads.load(std::memory_order_relaxed))
      while (take_chunk()) helped.fetch_add(1, std::memory_order_relaxed);
    const auto until = std::chrono::steady_clock::now() + SPIN;
    while (calls.load(std::memory_order_relaxed) == seen) {
      for (int i = 0; i < 32 && calls.load(std::memory_order_relaxed) == seen; ++i) pause_core();
      sched_yield();  // Python may want this core
      if (std::chrono::steady_clock::now() < until) continue;
      asleep.fetch_add(1);
      calls.wait(seen);
      asleep.fetch_sub(1);
    }
  }
}

// They live as long as the process, take no signal, and do not outlive a fork.
static void start_helpers(int wanted) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (pthread_t thread; started + 1 < wanted; ++started) {
    if (pthread_create(&thread, nullptr, help, (void*)intptr_t(started + 1))) break;
    pthread_detach(thread);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

static void after_fork() {
  started = 0;
  asleep = 0;
  work = 0;
  busy.clear();
}

static void multiply(const Product& p, int wanted) {
  const int64_t weights = int64_t(p.n) * p.k;
  wanted = std::min(wanted, MOST_THREADS);
  if (wanted < 2 || weights < LEAST_TO_SHARE || busy.test_and_set(std::memory_order_acquire))
    return compute(p, 0, p.n);  // another thread's product is shared at the moment
  if (started + 1 < wanted) start_helpers(wanted);
  threads.store(wanted, std::memory_order_relaxed);
  const int columns = (p.n + 4 * wanted - 1) / (4 * wanted);
  chunk = (columns + CHUNK - 1) / CHUNK * CHUNK;
  shared = p;
  done.store(0, std::memory_order_relaxed);
  const uint32_t chunks = (p.n + chunk - 1) / chunk, number = calls.load() + 1;
  work.store(uint64_t(number) << 32 | chunks, std::memory_order_release);
  calls.store(number);
  if (asleep.load() && weights >= LEAST_TO_WAKE) calls.notify_all();
  while (take_chunk()) {
  }
  for (int i = 0; done.load(std::memory_order_acquire) != chunks; ++i)
    i < 1000 ? pause_core() : (void)sched_yield();  // a helper may wait for this core
  busy.clear(std::memory_order_release);
}

static std::atomic<int> most_rows{0};
static Gemm others = nullptr;
static int (*blas_threads)() = nullptr;

// cblas_sgemm, as MLX calls it.
static void gemm(int layout, int trans_a, int trans_b, int m, int n, int k, float alpha,
                 const float* a, int lda, const float* b, int ldb, float beta, float* c, int ldc) {
  const bool taken = layout == 101 && trans_a == 111 && trans_b == 112 && m > 0 &&
                     m <= most_rows.load(std::memory_order_relaxed) && k >= LEAST_WIDTH &&
                     n >= LEAST_OUTPUTS && int64_t(n) * k >= FEWEST_WEIGHTS && alpha != 0;
  if (taken)
    multiply({m, n, k, alpha, a, lda, b, ldb, beta, c, ldc}, blas_threads());
  else
    others(layout, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

// Puts gemm into the tables through which a library of MLX calls cblas_sgemm.
static int replace(dl_phdr_info* object, size_t, void* count) {
  if (!strstr(object->dlpi_name, "/libmlx.") && !strstr(object->dlpi_name, "/mlx/core.")) return 0;
  const auto at = [&](size_t address) {  // the loader may have added where the library lies
    return address < object->dlpi_addr ? address + object->dlpi_addr : address;
  };
  const ElfW(Dyn)* entry = nullptr;
  for (int i = 0; i < object->dlpi_phnum; ++i)
    if (object->dlpi_phdr[i].p_type == PT_DYNAMIC)
      entry = (const ElfW(Dyn)*)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  const ElfW(Rela)* tables[2] = {};
  size_t bytes[2] = {};
  for (; entry && entry->d_tag != DT_NULL; ++entry) {
    if (entry->d_tag == DT_SYMTAB) symbols = (const ElfW(Sym)*)at(entry->d_un.d_ptr);
    if (entry->d_tag == DT_STRTAB) names = (const char*)at(entry->d_un.d_ptr);
    if (entry->d_tag == DT_JMPREL) tables[0] = (const ElfW(Rela)*)at(entry->d_un.d_ptr);
    if (entry->d_tag == DT_PLTRELSZ) bytes[0] = entry->d_un.d_val;
    if (entry->d_tag == DT_RELA) tables[1] = (const ElfW(Rela)*)at(entry->d_un.d_ptr);
    if (entry->d_tag == DT_RELASZ) bytes[1] = entry->d_un.d_val;
  }
  const size_t page = sysconf(_SC_PAGESIZE);
  for (int t = 0; t < 2; ++t)
    for (const ElfW(Rela)* r = tables[t]; r && r < tables[t] + bytes[t] / sizeof(*r); ++r) {
      if (strcmp(names + symbols[ELF64_R_SYM(r->r_info)].st_name, "cblas_sgemm")) continue;
      void** slot = (void**)(object->dlpi_addr + r->r_offset);
      if (mprotect((void*)((size_t)slot / page * page), page, PROT_READ | PROT_WRITE)) continue;
      __atomic_store_n(slot, (void*)gemm, __ATOMIC_RELEASE);
      ++*(int*)count;
    }
  return 0;
}

extern "C" {

// A product by this file alone; the probe's and the tests'.
void few_rows_multiply(int m, int n, int k, float alpha, const float* a, int lda, const float* b,
                       int ldb, float beta, float* c, int ldc, int wanted) {
  multiply({m, n, k, alpha, a, lda, b, ldb, beta, c, ldc}, wanted);
}

uint64_t few_rows_helped() { return helped.load(); }

// Returns in how many places MLX calls this file now: of up to `rows` rows; 0: none was found.
int few_rows_use(Gemm blas, int (*count_threads)(), int rows) {
  static const int registered = pthread_atfork(nullptr, nullptr, after_fork);
  (void)registered;
  static int places = 0;
  others = blas;
  blas_threads = count_threads;
  most_rows = rows;
  if (!places) dl_iterate_phdr(replace, &places);
  return places;
}
}
