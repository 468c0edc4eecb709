/* test_driver.c: opening the driver: what is asked for, what is said when it is not there, forks; and the bracket.
 *
 * The driver is opened once per process and its failure is kept, so that each case runs in a process of its own, on
 * tests/c/fake_libcuda.c, which is compiled here. */
// sources: csrc/driver.c csrc/err.c
#include "cases.h"
#include "fake_libcuda.h"

#include <libgen.h>
#include <pthread.h>

static char folder[] = "/tmp/zcx-test-driver-XXXXXX";
static char v2[sizeof folder + 32], plain[sizeof folder + 32];

static void build(const char *out, const char *flags) {
    char source[512], command[2048];
    const char *cc = getenv("CC");
    snprintf(source, sizeof source, "%s", __FILE__);
    char *here = dirname(source);
    snprintf(command, sizeof command,
             "%s -std=c11 -Wall -Wextra -Wmissing-prototypes -Werror -fvisibility=hidden -shared -fPIC -pthread %s "
             "-I'%s' -I'%s/../../csrc' -o '%s' '%s/fake_libcuda.c'", cc ? cc : "gcc", flags, here, here, out, here);
    CHECK(system(command) == 0, "%s", command);
}

/* The fake as this process will open it. */
static struct fake_say *fake(const char *path) {
    setenv("ZCX_LIBCUDA", path, 1);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK(library, "%s", dlerror());
    struct fake_say *say = dlsym(library, "fake_say");
    CHECK(say);
    return say;
}

static const struct zcx_driver *opened(void) {
    const struct zcx_driver *d = NULL;
    struct zcx_err err = {0};
    CHECK(zcx_driver_opened() == NULL);
    CHECK(zcx_driver_open(&d, &err) == 0, "%s", err.text);
    CHECK(d && zcx_driver_opened() == d);
    return d;
}

/* Refused, with these words; and refused again in the same words, whatever changed in between. */
static void refused(const char *words) {
    const struct zcx_driver *d = (void *)1;
    struct zcx_err err = {0}, second = {0};
    CHECK(zcx_driver_open(&d, &err) == -ZCX_E_NODRIVER);
    CHECK(err.code == ZCX_E_NODRIVER && strstr(err.text, words), "'%s' is not in '%s'", words, err.text);
    CHECK(d == (void *)1 && zcx_driver_opened() == NULL);
    setenv("ZCX_LIBCUDA", v2, 1);
    CHECK(zcx_driver_open(&d, &second) == -ZCX_E_NODRIVER);
    CHECK(strcmp(err.text, second.text) == 0 && err.line == second.line);
    CHECK(zcx_driver_open(&d, NULL) == -ZCX_E_NODRIVER);
}

CASE(missing_library) {
    setenv("ZCX_LIBCUDA", "/nonexistent/libcuda.so.1", 1);
    refused("/nonexistent/libcuda.so.1");
}

CASE(some_other_library) {
    setenv("ZCX_LIBCUDA", "libm.so.6", 1);
    refused("is no CUDA driver, or one older than CUDA 11.4");
}

CASE(old_driver) {
    fake(v2)->version = 11030;
    refused("CUDA 11.3, at least 11.4 is needed");
}

CASE(old_driver_plain_lookup) {
    struct fake_say *say = fake(plain);
    say->version = 11030;
    say->lacks_as_error = 1;
    refused("CUDA 11.3, at least 11.4 is needed");
    CHECK(strcmp(say->entry, "plain") == 0);
}

CASE(missing_symbol) {
    struct fake_say *say = fake(v2);
    strcpy(say->lacks, "cuMemPoolExportPointer");
    refused("lacks cuMemPoolExportPointer as of CUDA 11.2");
    CHECK(say->log[0] == 0, "called before it was found fit: %s", say->log);
}

CASE(missing_symbol_as_error) {
    struct fake_say *say = fake(plain);
    strcpy(say->lacks, "cuInit");
    say->lacks_as_error = 1;
    refused("lacks cuInit as of CUDA 2.0");
}

CASE(missing_version_function) {
    strcpy(fake(v2)->lacks, "cuDriverGetVersion");
    refused("lacks cuDriverGetVersion as of CUDA 2.2");
}

CASE(missing_optional_symbol) {
    strcpy(fake(v2)->lacks, "cuStreamWriteValue64");
    const struct zcx_driver *d = opened();
    CHECK(!d->StreamWriteValue64 && d->StreamWaitValue64 && d->CtxRecordEvent);
}

CASE(vmm_where_all_of_it_is) {
    fake(v2)->cannot = ZCU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
    const struct zcx_driver *d = opened();
    CHECK(d->vmm[0] == 1 && d->vmm[1] == 0, "the second device cannot share");
}

CASE(no_vmm_without_one_of_its_functions) {
    strcpy(fake(v2)->lacks, "cuMemRetainAllocationHandle");
    const struct zcx_driver *d = opened();
    CHECK(!d->MemRetainAllocationHandle && d->MemCreate && d->count == 2 && !d->vmm[0] && !d->vmm[1]);
}

CASE(no_vmm_where_the_device_says_no) {
    fake(v2)->cannot = ZCU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    const struct zcx_driver *d = opened();
    CHECK(d->vmm[0] == 1 && d->vmm[1] == 0);
}

CASE(no_vmm_where_the_question_is_unknown) {
    fake(v2)->attribute = ZCU_ERROR_INVALID_VALUE;
    const struct zcx_driver *d = opened();
    CHECK(d->count == 2 && !d->vmm[0] && !d->vmm[1]);
}

CASE(driver_of_cuda_11) {
    struct fake_say *say = fake(plain);
    say->version = 11070;
    const struct zcx_driver *d = opened();
    CHECK(strcmp(say->entry, "plain") == 0);
    CHECK(!d->CtxRecordEvent && d->StreamWriteValue64, "12.5 has it, 11.7 has the other");
}

CASE(init_fails) {
    fake(v2)->init = ZCU_ERROR_NO_DEVICE;
    refused("cuInit: CUDA_ERROR_NO_DEVICE (no device is there)");
    CHECK(zcx_driver_error_name(1) && zcx_driver_error_text(1));
}

CASE(no_device) {
    fake(v2)->count = 0;
    refused("no device");
}

CASE(too_many_devices) {
    fake(v2)->count = ZCX_MAX_DEVICES + 1;
    refused("more than the 64");
}

CASE(as_many_devices_as_fit) {
    fake(v2)->count = ZCX_MAX_DEVICES;
    const struct zcx_driver *d = opened();
    int ordinal = -1;
    zcu_uuid last = d->uuid[ZCX_MAX_DEVICES - 1];
    CHECK(zcx_driver_find(d, &last, &ordinal) == 0 && ordinal == ZCX_MAX_DEVICES - 1);
    last.bytes[15] ^= 1;
    CHECK(zcx_driver_find(d, &last, &ordinal) == 1 && ordinal == ZCX_MAX_DEVICES - 1);
}

CASE(asks_for_pinned_versions) {
    static const struct { const char *name; int version; } table[] = {
#define X(name, version, required, arguments) {"cu" #name, version},
        ZCX_DRIVER_SYMBOLS(X)
#undef X
    };
    struct fake_say *say = fake(v2);
    const struct zcx_driver *d = opened();
    CHECK(strcmp(say->entry, "v2") == 0);
    CHECK(say->nasked == sizeof table / sizeof *table, "%d", say->nasked);
    for (int i = 0; i < say->nasked; i++) {
        CHECK(strcmp(say->asked[i].name, table[i].name) == 0);
        CHECK(say->asked[i].version == table[i].version && say->asked[i].flags == ZCU_GET_PROC_ADDRESS_LEGACY_STREAM);
    }
    CHECK(d->version == 13000 && d->count == 2 && strstr(d->path, "zcx-test-driver"));
    CHECK(d->uuid[0].bytes[0] == 100 && d->uuid[1].bytes[15] == 101);
}

static void forked_here(void) {
    const struct zcx_driver *d;
    struct zcx_err err;
    struct zcx_scope s;
    CHECK(zcx_driver_opened() == NULL);
    CHECK(zcx_driver_open(&d, &err) == -ZCX_E_NODRIVER && strstr(err.text, "forked from process"), "%s", err.text);
    CHECK(zcx_scope_open(&s, -1, &err) == -ZCX_E_NODRIVER);
    CHECK(zcx_driver_error_name(1) && zcx_driver_error_text(1));
}

CASE(fork_after_opening) {
    struct fake_say *say = fake(v2);
    const struct zcx_driver *d = opened();
    say->log[0] = 0;
    CHECK(case_fork(forked_here) == 0);
    CHECK(zcx_driver_opened() == d);
}

static void forked_before_here(void) { opened(); }

CASE(fork_before_opening) {
    fake(v2);
    CHECK(case_fork(forked_before_here) == 0, "a child of a process that never touched CUDA is free to");
    opened();
}

static void forked_after_failure_here(void) {
    const struct zcx_driver *d;
    struct zcx_err err;
    CHECK(zcx_driver_open(&d, &err) == -ZCX_E_NODRIVER && strstr(err.text, "/nonexistent"), "%s", err.text);
}

CASE(fork_after_failure) {
    setenv("ZCX_LIBCUDA", "/nonexistent/libcuda.so.1", 1);
    refused("/nonexistent");
    CHECK(case_fork(forked_after_failure_here) == 0);
}

CASE(scope_without_context) {
    struct fake_say *say = fake(v2);
    struct zcx_scope s;
    struct zcx_err err;
    CHECK(zcx_scope_open(&s, -1, &err) == 0);
    CHECK(s.d == zcx_driver_opened(), "a scope opens the driver");
    zcx_scope_close(&s);
    CHECK(strcmp(say->log, "init relax back ") == 0, "%s", say->log);
    CHECK(say->retained == 0);
}

CASE(scope_with_context) {
    struct fake_say *say = fake(v2);
    const struct zcx_driver *d = opened();
    struct zcx_scope outer, inner, other;
    zcu_ctx c;
    say->log[0] = 0;
    CHECK(zcx_scope_open(&outer, 1, NULL) == 0);
    CHECK(d->CtxGetCurrent(&c) == 0 && c);
    CHECK(zcx_scope_open(&inner, 1, NULL) == 0);
    CHECK(zcx_scope_open(&other, 0, NULL) == 0);
    zcu_ctx o;
    CHECK(d->CtxGetCurrent(&o) == 0 && o != c);
    zcx_scope_close(&other);
    zcx_scope_close(&inner);
    CHECK(d->CtxGetCurrent(&o) == 0 && o == c);
    zcx_scope_close(&outer);
    CHECK(strcmp(say->log, "relax push relax relax push pop relax relax pop back ") == 0, "%s", say->log);
    CHECK(d->CtxGetCurrent(&o) == 0 && !o);
    CHECK(say->retained == 2, "once per device");
}

CASE(scope_that_fails_leaves_nothing) {
    struct fake_say *say = fake(v2);
    const struct zcx_driver *d = opened();
    struct zcx_scope s = {.mode = 77};
    struct zcx_err err;
    zcu_ctx c;
    say->log[0] = 0;
    CHECK(zcx_scope_open(&s, d->count, &err) == -ZCX_E_RANGE && say->log[0] == 0);
    say->retain = ZCU_ERROR_OUT_OF_MEMORY;
    CHECK(zcx_scope_open(&s, 0, &err) == -ZCX_E_CUDA && err.cuda == ZCU_ERROR_OUT_OF_MEMORY);
    CHECK(strcmp(err.call, "cuDevicePrimaryCtxRetain") == 0 && strstr(err.file, "driver.c") && err.line > 0);
    CHECK(strcmp(say->log, "relax back ") == 0, "%s", say->log);
    say->retain = 0;
    say->push = ZCU_ERROR_INVALID_CONTEXT;
    say->log[0] = 0;
    CHECK(zcx_scope_open(&s, 0, &err) == -ZCX_E_CUDA && strcmp(err.call, "cuCtxPushCurrent") == 0);
    CHECK(strcmp(say->log, "relax push back ") == 0, "%s", say->log);
    CHECK(s.mode == 77 && d->CtxGetCurrent(&c) == 0 && !c);
}

CASE(pointers) {
    struct fake_say *say = fake(v2);
    const struct zcx_driver *d = opened();
    struct zcx_ptr_info info = {0}, unknown = {.base = 1, .ordinal = 5, .type = 9};
    say->log[0] = 0;
    CHECK(zcx_driver_ptr_info(d, 0x700000000400, &info, NULL) == 0);
    CHECK(strcmp(say->log, "relax attributes back ") == 0, "%s", say->log);
    CHECK(info.type == ZCU_MEMORYTYPE_DEVICE && info.base == 0x700000000000 && info.size == (uint64_t)5 << 30);
    CHECK(info.buffer_id == (uint64_t)7 << 40 && info.ordinal == 1);
    CHECK(info.legacy_ipc == 1 && info.handle_types == 1 && info.pool);
    CHECK(zcx_driver_ptr_info(d, 0, &unknown, NULL) == 0);
    CHECK(!unknown.type && !unknown.base && !unknown.ordinal && !unknown.pool && !unknown.size);
}

CASE(capturing) {
    fake(v2);
    const struct zcx_driver *d = opened();
    CHECK(zcx_driver_capturing(d, 0, NULL, NULL) == 0);
    CHECK(zcx_driver_capturing(d, 0, (zcu_stream)(void *)d, NULL) == 1);
    CHECK(zcx_driver_capturing(d, 9, NULL, NULL) == -ZCX_E_RANGE);
}

CASE(error_words) {
    fake(v2);
    opened();
    struct zcx_err err;
    CHECK(zcx_cu(&err, "cuFoo", ZCU_SUCCESS) == 0);
    CHECK(zcx_cu(&err, "cuFoo", ZCU_ERROR_NO_DEVICE) == -ZCX_E_CUDA);
    CHECK(err.cuda == ZCU_ERROR_NO_DEVICE && strcmp(err.text, "no device is there") == 0 && strcmp(err.call, "cuFoo") == 0);
    CHECK(strcmp(zcx_driver_error_name(ZCU_ERROR_NO_DEVICE), "CUDA_ERROR_NO_DEVICE") == 0);
    CHECK(zcx_driver_error_name(12345) && zcx_driver_error_text(12345), "never NULL, whatever the driver says");
}

static void *open_and_bracket(void *out) {
    struct zcx_scope s;
    CHECK(zcx_scope_open(&s, 1, NULL) == 0);
    *(const void **)out = s.d;
    return NULL;
}

CASE(threads_open_once) {
    struct fake_say *say = fake(v2);
    pthread_t threads[8];
    const void *seen[8] = {0};
    say->push = ZCU_SUCCESS;
    for (int i = 0; i < 8; i++) CHECK(pthread_create(&threads[i], NULL, open_and_bracket, &seen[i]) == 0);
    for (int i = 0; i < 8; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        CHECK(seen[i] == zcx_driver_opened());
    }
    CHECK(say->retained == 1, "%d", say->retained);
}

int main(void) {
    CHECK(mkdtemp(folder));
    snprintf(v2, sizeof v2, "%s/v2.so", folder);
    snprintf(plain, sizeof plain, "%s/plain.so", folder);
    build(v2, "");
    build(plain, "-DFAKE_PLAIN");
    RUN(missing_library);
    RUN(some_other_library);
    RUN(old_driver);
    RUN(old_driver_plain_lookup);
    RUN(missing_symbol);
    RUN(missing_symbol_as_error);
    RUN(missing_version_function);
    RUN(missing_optional_symbol);
    RUN(vmm_where_all_of_it_is);
    RUN(no_vmm_without_one_of_its_functions);
    RUN(no_vmm_where_the_device_says_no);
    RUN(no_vmm_where_the_question_is_unknown);
    RUN(driver_of_cuda_11);
    RUN(init_fails);
    RUN(no_device);
    RUN(too_many_devices);
    RUN(as_many_devices_as_fit);
    RUN(asks_for_pinned_versions);
    RUN(fork_after_opening);
    RUN(fork_before_opening);
    RUN(fork_after_failure);
    RUN(scope_without_context);
    RUN(scope_with_context);
    RUN(scope_that_fails_leaves_nothing);
    RUN(pointers);
    RUN(capturing);
    RUN(error_words);
    RUN(threads_open_once);
    CHECK(unlink(v2) == 0 && unlink(plain) == 0 && rmdir(folder) == 0);
    return 0;
}
