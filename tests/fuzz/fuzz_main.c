/* fuzz_main.c: runs a fuzz target where there is no libFuzzer: first every file given (folders: what is in them), then random
 * mutations of those, the same ones for the same seed.
 *
 *     fuzz_x [-runs=N] [-seconds=N] [-seed=N] file-or-folder…
 *
 * Each input lies in memory of just its size, so that ASan sees a read too far. When the target dies the input is printed as
 * hex digits. Mutants that the target accepts are mutated further: no other feedback, that is libFuzzer's job. */
#include <dirent.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>

#include "fuzz.h"

#define INPUT_MAX 4096
#define POOL_MAX 2000

struct input { uint8_t *bytes; size_t size; };

static struct input pool[POOL_MAX];
static size_t pool_size, files, files_accepted;
static struct input now; /* what the target is looking at */

extern void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static void say_input(void) {
    fprintf(stderr, "input:");
    for (size_t i = 0; i < now.size; i++) fprintf(stderr, " %02x", now.bytes[i]);
    fputc('\n', stderr);
}

static void on_abort(int number) { /* HOLDS: the default action follows */
    (void)number;
    say_input();
}

/* Takes the bytes. Kept inputs come back when others are made from them. */
static void run(struct input in, int keep) {
    now = in;
    LLVMFuzzerTestOneInput(in.bytes, in.size);
    if (pool_size < POOL_MAX && (keep || fuzz_accepted)) pool[pool_size++] = in;
    else free(in.bytes);
}

static void run_path(const char *path) {
    struct stat st;
    if (stat(path, &st)) {
        perror(path);
        exit(2);
    }
    if (S_ISDIR(st.st_mode)) {
        struct dirent **entries;
        int n = scandir(path, &entries, NULL, alphasort); /* in order: the seed decides, not the file system */
        for (int i = 0; i < n; i++) {
            char inner[4096];
            snprintf(inner, sizeof inner, "%s/%s", path, entries[i]->d_name);
            if (entries[i]->d_name[0] != '.') run_path(inner);
            free(entries[i]);
        }
        if (n >= 0) free(entries);
        return;
    }
    struct input in = {malloc((size_t)st.st_size), (size_t)st.st_size};
    FILE *f = fopen(path, "rb");
    if (!f || fread(in.bytes, 1, in.size, f) != in.size) {
        perror(path);
        exit(2);
    }
    fclose(f);
    run(in, 1);
    files++;
    files_accepted += fuzz_accepted ? 1 : 0;
    printf("%s %s\n", fuzz_accepted ? "accepted" : "refused", path);
}

static uint64_t state;

static uint64_t draw(uint64_t n) { /* splitmix64 */
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (z ^ z >> 31) % n;
}

/* Grow or shrink at `at` by moving what is behind it. */
static size_t splice(uint8_t *b, size_t size, size_t at, size_t drop, const uint8_t *bytes, size_t add) {
    if (drop > size - at) drop = size - at;
    if (add > INPUT_MAX - (size - drop)) add = INPUT_MAX - (size - drop);
    uint8_t piece[INPUT_MAX];
    memcpy(piece, bytes, add);
    memmove(b + at + add, b + at + drop, size - at - drop);
    memcpy(b + at, piece, add);
    return size - drop + add;
}

static size_t mutate(uint8_t *b, size_t size) {
    static const uint64_t numbers[] = {0, 1, 2, 0x3f, 0x40, 0x41, 0x7f, 0x80, 0xff, 0x100, 0x1000, 0x1001, 0x7fff, 0x8000, 0xffff, 0x10000,
                                       0x02000000, 0x08000000, 0x20000000, 0x7fffffff, 0x80000000, 0xffffffff, 0x100000000,
                                       0x7fffffffffffffff, 0x8000000000000000, 0xffffffffffffffff};
    size_t at = size ? draw(size) : 0, width = (size_t)1 << draw(4);
    const struct input *other = &pool[draw(pool_size)];
    uint8_t random[16];
    switch (draw(8)) {
    case 0:
        if (size) b[at] ^= (uint8_t)(1u << draw(8));
        return size;
    case 1:
        if (size) b[at] = (uint8_t)draw(256);
        return size;
    case 2: case 3:
        if (size < width) return size;
        at = draw(size - width + 1);
        uint64_t v = numbers[draw(sizeof numbers / sizeof *numbers)];
        for (size_t i = 0; i < width; i++) b[at + i] = (uint8_t)(v >> 8 * i);
        return size;
    case 4:
        return splice(b, size, at, 1 + draw(16), random, 0);
    case 5:
        for (size_t i = 0; i < sizeof random; i++) random[i] = (uint8_t)draw(256);
        return splice(b, size, at, 0, random, 1 + draw(sizeof random));
    case 6: { /* a part of another input, put in or over */
        if (!other->size) return size;
        size_t from = draw(other->size), n = 1 + draw(other->size - from);
        return splice(b, size, at, draw(2) ? n : 0, other->bytes + from, n);
    }
    default:
        return at;
    }
}

static void one_mutant(void) {
    uint8_t b[INPUT_MAX];
    const struct input *from = &pool[draw(draw(2) ? files : pool_size)]; /* mutants of mutants drift to what is easily accepted */
    size_t size = from->size < INPUT_MAX ? from->size : INPUT_MAX;
    memcpy(b, from->bytes, size);
    for (uint64_t n = 1 + draw(4); n; n--) size = mutate(b, size);
    struct input in = {malloc(size ? size : 1), size};
    memcpy(in.bytes, b, size);
    run(in, 0);
}

int main(int argc, char **argv) {
    unsigned long long runs = 0, seconds = 0, seed = 1, done = 0, accepted = 0;
    signal(SIGABRT, on_abort);
    if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(say_input);
    for (int i = 1; i < argc; i++)
        if (sscanf(argv[i], "-runs=%llu", &runs) != 1 && sscanf(argv[i], "-seconds=%llu", &seconds) != 1 &&
            sscanf(argv[i], "-seed=%llu", &seed) != 1)
            run_path(argv[i]);
    if (!pool_size) {
        fprintf(stderr, "usage: %s [-runs=N] [-seconds=N] [-seed=N] file-or-folder...\n", argv[0]);
        return 2;
    }
    state = seed;
    for (time_t end = time(NULL) + (time_t)seconds; done < runs || time(NULL) < end; done++) {
        one_mutant();
        accepted += fuzz_accepted ? 1 : 0;
    }
    printf("seed %llu: %zu files, %zu accepted; %llu mutants, %llu accepted\n", seed, files, files_accepted, done, accepted);
    for (size_t i = 0; i < pool_size; i++) free(pool[i].bytes);
    return 0;
}
