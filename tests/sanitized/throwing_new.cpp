// An operator new that throws where there is no memory: AddressSanitizer's own ends the process.
#include <cstdlib>
#include <new>

namespace {

void* or_throw(void* found) {
  if (!found) throw std::bad_alloc();
  return found;
}

}  // namespace

void* operator new(std::size_t size) { return or_throw(std::malloc(size)); }

void* operator new[](std::size_t size) { return or_throw(std::malloc(size)); }

void* operator new(std::size_t size, std::align_val_t alignment) {
  void* found = nullptr;
  return or_throw(posix_memalign(&found, std::size_t(alignment), size) ? nullptr : found);
}
