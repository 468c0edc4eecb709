// The logic that the two patches add, run without torch: the headers come out of the patches as they stand, torch's checks
// and the CUDA runtime are stubs, the driver is the library that $ZCX_LIBCUDA names (the simulated one in CI).
//
// harness pools: the current pool is configured, counted, trimmed, its peaks reset; peers are remembered for pools to come.
// harness ipc: a second process (this program, re-executed) opens handles, twice each, and drops them; too large is refused.
// Does not: compile CUDAMallocAsyncAllocator.cpp itself, whose few changed lines only call into these headers.
#include <c10/cuda/CUDAMallocAsyncIpc.h>
#include <c10/cuda/CUDAMallocAsyncPools.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

using namespace c10::cuda::CUDACachingAllocator::CudaMallocAsync;

constexpr size_t MiB = 1 << 20;

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                             \
        }                                                                             \
    } while (0)

static void must(cudaError_t result, const char *what) {
    if (result == cudaSuccess) return;
    std::fprintf(stderr, "%s -> %d\n", what, result);
    std::exit(1);
}
#define MUST(call) must(call, #call)

static void open_driver() {
    MUST(driver("cuInit", 0u));
    MUST(cudaSetDevice(0));
}

static unsigned char byte_at(void *p) {
    unsigned char out = 0;
    MUST(driver("cuMemcpyDtoHAsync_v2", static_cast<void *>(&out), reinterpret_cast<unsigned long long>(p), size_t{1},
                static_cast<void *>(nullptr)));
    MUST(cudaDeviceSynchronize());
    return out;
}

static void fill(void *p, unsigned char byte, size_t n) {
    MUST(driver("cuMemsetD8Async", reinterpret_cast<unsigned long long>(p), byte, n, static_cast<void *>(nullptr)));
    MUST(cudaDeviceSynchronize());
}

static uint64_t attribute(cudaMemPool_t pool, cudaMemPoolAttr which) {
    uint64_t value = 0;
    MUST(cudaMemPoolGetAttribute(pool, which, &value));
    return value;
}

static int pools() {
    open_driver();
    DevicePools device(0);
    cudaMemPool_t first = nullptr, ours = nullptr;
    MUST(cudaDeviceGetDefaultMemPool(&first, 0));
    device.configure();
    CHECK(attribute(first, cudaMemPoolAttrReleaseThreshold) == UINT64_MAX);
    void *early = nullptr, *late = nullptr;
    MUST(cudaMallocAsync(&early, 64 * MiB, nullptr));
    CHECK(device.total(cudaMemPoolAttrUsedMemCurrent) == 64 * MiB);
    int peers = 0;
    MUST(driver("cuDeviceGetCount", &peers));
    if (peers > 1) device.allow(1);

    cudaMemPoolProps props = {};
    props.allocType = cudaMemAllocationTypePinned;
    props.location = {cudaMemLocationTypeDevice, 0};
    MUST(cudaMemPoolCreate(&ours, &props));
    CHECK(attribute(ours, cudaMemPoolAttrReleaseThreshold) == 0);
    MUST(cudaDeviceSetMemPool(0, ours));
    device.configure();
    CHECK(attribute(ours, cudaMemPoolAttrReleaseThreshold) == UINT64_MAX);
    MUST(cudaMallocAsync(&late, 96 * MiB, nullptr));
    CHECK(device.total(cudaMemPoolAttrUsedMemCurrent) == 160 * MiB);   /* earlier allocations still count */
    CHECK(device.total(cudaMemPoolAttrUsedMemHigh) == 160 * MiB);
    if (peers > 1) {   /* the pool that came later is reachable from the peer: it was remembered */
        MUST(cudaSetDevice(1));
        fill(late, 0x77, MiB);
        MUST(cudaSetDevice(0));
        CHECK(byte_at(late) == 0x77);
    }
    MUST(cudaFreeAsync(late, nullptr));
    MUST(cudaFreeAsync(early, nullptr));
    MUST(cudaDeviceSynchronize());
    CHECK(device.total(cudaMemPoolAttrReservedMemCurrent) >= 160 * MiB);
    device.trim();
    CHECK(device.total(cudaMemPoolAttrReservedMemCurrent) == 0);
    device.reset_peaks();
    CHECK(device.total(cudaMemPoolAttrUsedMemHigh) == 0);
    std::puts("ok pools");
    return 0;
}

/* One string each way, with its length in front. */
static void put(int fd, const std::string &s) {
    uint32_t n = static_cast<uint32_t>(s.size());
    CHECK(write(fd, &n, 4) == 4 && write(fd, s.data(), n) == static_cast<ssize_t>(n));
}
static std::string get(int fd) {
    uint32_t n = 0;
    CHECK(read(fd, &n, 4) == 4 && n < 4096);
    std::string s(n, 0);
    CHECK(read(fd, s.data(), n) == static_cast<ssize_t>(n));
    return s;
}

static int importer(int fd) {
    open_driver();
    PoolImports imports;
    const auto one = get(fd), two = get(fd);
    {
        auto a = imports.open(one, 0), again = imports.open(one, 0), b = imports.open(two, 0);
        CHECK(a.get() == again.get() && a.get() != b.get() && imports.size() == 2);
        CHECK(byte_at(a.get()) == 0x21 && byte_at(static_cast<char *>(b.get()) + 5 * MiB - 1) == 0x43);
        a.reset();
        CHECK(imports.size() == 2 && byte_at(again.get()) == 0x21);   /* the first drop unmaps nothing */
        fill(again.get(), 0x65, MiB);
        again.reset();
        CHECK(imports.size() == 1 && byte_at(b.get()) == 0x43);
        auto back = imports.open(one, 0);                             /* and once more after the last one went */
        CHECK(byte_at(back.get()) == 0x65);
    }
    CHECK(imports.size() == 0);
    for (const std::string &bad : {std::string("junk"), std::string(one.size(), 'x')}) {
        bool refused = false;
        try {
            imports.open(bad, 0);
        } catch (const std::runtime_error &) {
            refused = true;
        }
        CHECK(refused && imports.size() == 0);
    }
    put(fd, "done");
    return 0;
}

static int ipc() {
    CHECK(fits_one_import(127 * kPoolChunk) && !fits_one_import(127 * kPoolChunk + 1) && fits_one_import(1));
    int pair[2];
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    const pid_t child = fork();   /* before the driver is opened; the child becomes another program */
    if (!child) {
        close(pair[0]);
        char number[16];
        std::snprintf(number, sizeof number, "%d", pair[1]);
        execl("/proc/self/exe", "harness", "importer", number, static_cast<char *>(nullptr));
        _exit(127);
    }
    close(pair[1]);
    prctl(PR_SET_PTRACER, child, 0, 0, 0);   /* pidfd_getfd asks for the right to trace */
    open_driver();
    ShareablePool pool;
    void *a = nullptr, *b = nullptr;
    bool refused = false;
    try {
        pool.share(a, MiB, 1);
    } catch (const std::runtime_error &) {
        refused = true;
    }
    CHECK(refused && !pool.active());
    pool.make_current(0);
    pool.make_current(0);
    MUST(cudaMallocAsync(&a, 64 * MiB, nullptr));
    MUST(cudaMallocAsync(&b, 5 * MiB, nullptr));
    fill(a, 0x21, 64 * MiB);
    fill(b, 0x43, 5 * MiB);
    const auto one = pool.share(a, 64 * MiB, 1), two = pool.share(b, 5 * MiB, 2);
    CHECK(one != two);
    refused = false;
    try {
        pool.share(a, 4096 * MiB, 3);
    } catch (const std::runtime_error &error) {
        refused = std::strstr(error.what(), "4 GiB") != nullptr;
    }
    CHECK(refused);
    put(pair[0], one);
    put(pair[0], two);
    CHECK(get(pair[0]) == "done");
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(byte_at(a) == 0x65);   /* what the importer wrote in place */
    MUST(cudaFreeAsync(a, nullptr));   /* after the importer has dropped its own */
    MUST(cudaFreeAsync(b, nullptr));
    MUST(cudaDeviceSynchronize());
    std::puts("ok ipc");
    return 0;
}

int main(int argc, char **argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    if (what == "pools") return pools();
    if (what == "ipc") return ipc();
    if (what == "importer" && argc > 2) return importer(std::atoi(argv[2]));
    std::fprintf(stderr, "usage: harness pools|ipc\n");
    return 2;
}
