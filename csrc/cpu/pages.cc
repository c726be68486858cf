#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "error.h"
#include "gacc.h"

int32_t gacc_advise_huge_pages(void* data, int64_t size_bytes) {
#ifdef MADV_HUGEPAGE
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(size_bytes)) / page * page;
  // EINVAL: a kernel without huge pages, where there is nothing to ask for.
  if (end > begin && madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) != 0 && errno != EINVAL) {
    return gacc::fail("madvise(%p, %lld): %s", data, static_cast<long long>(size_bytes), std::strerror(errno));
  }
#else
  (void)data, (void)size_bytes;
#endif
  return 0;
}
