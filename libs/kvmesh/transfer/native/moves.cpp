// What moves bytes, called with the GIL released: copies of runs, runs through a socket, and the look at the doorbells.
// Offsets and lengths are columns of 64-bit integers. Nothing here allocates, and every loop is bounded by its arguments.

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#if defined(__AVX512F__) || defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

constexpr int kIov = 256;
constexpr int64_t kOutside = -4096;

#if defined(__AVX512F__)
constexpr int64_t kLine = 64;
inline void stream(char* to, const char* from) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}
#elif defined(__AVX__)
constexpr int64_t kLine = 64;
inline void stream(char* to, const char* from) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), a);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), b);
}
#endif

#if defined(__AVX__)
// Stores past the cache: a plain copy reads each line of the destination first, which costs a third of the bandwidth,
// and it throws out what the engine computes with. Four pages at a time keep four of the prefetcher's streams busy.
void copy(char* to, const char* from, int64_t length) {
  constexpr int64_t kPage = 4096, kBlock = 4 * kPage, kAhead = 512;
  const int64_t skew = -reinterpret_cast<intptr_t>(to) & (kLine - 1);
  if (length < 1024) {
    memcpy(to, from, length);
    return;
  }
  if (skew) {
    memcpy(to, from, skew);
    to += skew, from += skew, length -= skew;
  }
  while (length >= kBlock) {
    for (int64_t at = 0; at < kPage; at += kLine)
      for (int64_t page = 0; page < kBlock; page += kPage) {
        _mm_prefetch(from + page + at + kAhead, _MM_HINT_T0);
        stream(to + page + at, from + page + at);
      }
    to += kBlock, from += kBlock, length -= kBlock;
  }
  for (; length >= kLine; to += kLine, from += kLine, length -= kLine) stream(to, from);
  memcpy(to, from, length);
}
// Stores past the cache are not ordered with the store that tells of them.
inline void settle() { _mm_sfence(); }
#else
inline void copy(char* to, const char* from, int64_t length) { memcpy(to, from, length); }
inline void settle() { __atomic_thread_fence(__ATOMIC_RELEASE); }
#endif

inline bool outside(int64_t offset, int64_t length, int64_t size) {
  return offset < 0 || length < 1 || length > size || offset > size - length;
}

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1000000000 + t.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

inline bool rung(const uint64_t* const* bells, int64_t count, uint64_t value) {
  for (int64_t i = 0; i < count; ++i)
    if (__atomic_load_n(bells[i], __ATOMIC_ACQUIRE) < value) return false;
  return true;
}

// One gather or scatter of runs from position `run`, `done` bytes into it on.
int fill(iovec* iov, char* base, const int64_t* offset, const int64_t* length, int64_t count, int64_t run, int64_t done,
         int64_t budget) {
  int n = 0;
  for (; n < kIov && run < count && budget > 0; ++n, ++run, done = 0) {
    iov[n].iov_base = base + offset[run] + done;
    iov[n].iov_len = length[run] - done;
    budget -= length[run] - done;
  }
  return n;
}

}  // namespace

extern "C" {

// All runs, or none: kOutside where one is not inside of its region.
int64_t kvmesh_copy_runs(char* dst, int64_t dst_size, const char* src, int64_t src_size, const int64_t* dst_offset,
                         const int64_t* src_offset, const int64_t* length, int64_t count) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (outside(dst_offset[i], length[i], dst_size) || outside(src_offset[i], length[i], src_size)) return kOutside;
    total += length[i];
  }
  for (int64_t i = 0; i < count; ++i) copy(dst + dst_offset[i], src + src_offset[i], length[i]);
  settle();
  return total;
}

// Sends runs from place[0] (run) and place[1] (bytes of it that have gone) on, until `budget` bytes have gone, all have,
// or the socket takes no more; moves `place`. Bytes sent, or -errno where not even the first byte could be.
int64_t kvmesh_send_runs(int fd, char* base, int64_t size, const int64_t* offset, const int64_t* length, int64_t count,
                         int64_t* place, int64_t budget) {
  int64_t sent = 0;
  iovec iov[kIov];
  for (int64_t i = place[0]; i < count; ++i)
    if (outside(offset[i], length[i], size)) return kOutside;
  while (place[0] < count && sent < budget) {
    msghdr message{};
    message.msg_iov = iov;
    message.msg_iovlen = fill(iov, base, offset, length, count, place[0], place[1], budget - sent);
    const ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (sent && (errno == EAGAIN || errno == EWOULDBLOCK)) return sent;
      return -errno;
    }
    sent += n;
    for (int64_t left = n; left;) {
      const int64_t rest = length[place[0]] - place[1];
      if (left < rest) {
        place[1] += left;
        break;
      }
      left -= rest;
      ++place[0], place[1] = 0;
    }
  }
  return sent;
}

// Receives all runs from a blocking socket. 0, 1 at the end of the stream, -errno.
int64_t kvmesh_recv_runs(int fd, char* base, int64_t size, const int64_t* offset, const int64_t* length, int64_t count) {
  iovec iov[kIov];
  for (int64_t i = 0; i < count; ++i)
    if (outside(offset[i], length[i], size)) return kOutside;
  for (int64_t run = 0, done = 0; run < count;) {
    msghdr message{};
    message.msg_iov = iov;
    message.msg_iovlen = fill(iov, base, offset, length, count, run, done, INT64_MAX);
    const ssize_t n = recvmsg(fd, &message, MSG_WAITALL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? -errno : 1;
    for (int64_t left = n; left;) {
      const int64_t rest = length[run] - done;
      if (left < rest) {
        done += left;
        break;
      }
      left -= rest;
      ++run, done = 0;
    }
  }
  return 0;
}

// Waits until all doorbells have reached `value` or a descriptor has an event. First quiet_ns without a look at the bells,
// then looking: for spin_ns without a pause, for yield_ns giving the core to whoever wants it in between, and after that
// every step_ns; total_ns in all at most. 1 for the bells, 2 for a descriptor (its revents are set), 0 for neither, -errno.
int kvmesh_watch(pollfd* fds, int64_t nfds, const uint64_t* const* bells, int64_t count, uint64_t value, int64_t quiet_ns,
                 int64_t spin_ns, int64_t yield_ns, int64_t step_ns, int64_t total_ns) {
  const int64_t begin = now_ns();
  const int64_t close = begin + quiet_ns, calm = close + spin_ns + yield_ns, end = begin + total_ns;
  for (int64_t i = 0; i < nfds; ++i) fds[i].revents = 0;
  for (;;) {
    if (rung(bells, count, value)) return 1;
    const int64_t now = now_ns();
    if (now >= end) return 0;
    if (now >= close && now < close + spin_ns) {
      relax();
      continue;
    }
    if (now >= close && now < calm) {
      sched_yield();
      continue;
    }
    int64_t wait = now < close ? close - now : step_ns;
    if (wait > end - now) wait = end - now;
    const timespec time{wait / 1000000000, wait % 1000000000};
    const int ready = ppoll(fds, nfds, &time, nullptr);
    if (ready > 0) return 2;
    if (ready < 0 && errno != EINTR) return -errno;
  }
}
}
