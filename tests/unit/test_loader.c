/* ddp_loader: batches follow the sampler whatever the workers do, positions are kept, failures arrive at
   their position, and nothing hangs or leaks. */
#include "../support/unit.h"
#include "../support/watchdog.h"

#include "../../ddp.h"
#include "../../examples/extras/sources.h"
#include <dirent.h>
#include <malloc.h>
#include <pthread.h>
#include <unistd.h>

#define COUNT(array) (int)(sizeof(array) / sizeof((array)[0]))
#define OK(call)                                                           \
    do {                                                                   \
        if ((call) != DDP_OK) fail_msg("%s: %s", #call, ddp_last_error()); \
    } while (0)

static void says(ddp_result result, ddp_result wanted, const char *words) {
    if (result != wanted || !strstr(ddp_last_error(), words))
        fail_msg("%s `%s`, wanted %s with `%s`", ddp_result_name(result), result ? ddp_last_error() : "",
                 ddp_result_name(wanted), words);
}

/* The line begins with the call that the user made, not with that of the sampler inside. */
static void names(const char *call) {
    if (strncmp(ddp_last_error(), call, strlen(call)) != 0 || ddp_last_error()[strlen(call)] != ':')
        fail_msg("`%s` does not name %s", ddp_last_error(), call);
}

//== a data set: sample i is the number i and three floats =====================================================

typedef struct data {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int64_t fails[3];  /* these samples fail ... */
    int fail_count[3]; /* ... this many times */
    int silent;        /* without a line */
    int64_t blocks;    /* this sample blocks until the field has another value; -1 = none */
    int blocked;       /* threads that do */
    int64_t fetches;
} data;

static void data_init(data *d) {
    memset(d, 0, sizeof *d);
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->changed, NULL);
    d->blocks = -1;
}

static void data_blocks(data *d, int64_t sample) {
    pthread_mutex_lock(&d->lock);
    d->blocks = sample;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
}

static void data_await_blocked(data *d) { /* waits until a fetch blocks */
    pthread_mutex_lock(&d->lock);
    while (d->blocked == 0) pthread_cond_wait(&d->changed, &d->lock);
    pthread_mutex_unlock(&d->lock);
}

static ddp_result data_fetch(void *user, int64_t index, void *const *fields) {
    data *d = (data *)user;
    float numbers[3] = {(float)index, (float)(2 * index), -1};
    ddp_result result = DDP_OK;
    pthread_mutex_lock(&d->lock);
    d->fetches++;
    for (int i = 0; i < 3; i++)
        if (d->fail_count[i] > 0 && d->fails[i] == index) {
            d->fail_count[i]--;
            result = d->silent ? DDP_ERR_CORRUPT : ddp_fail(DDP_ERR_CORRUPT, "the disk says no to %d", i);
        }
    while (d->blocks == index) {
        d->blocked++;
        pthread_cond_broadcast(&d->changed);
        pthread_cond_wait(&d->changed, &d->lock);
        d->blocked--;
    }
    pthread_mutex_unlock(&d->lock);
    memcpy(fields[0], &index, sizeof index);
    memcpy(fields[1], numbers, sizeof numbers);
    return result;
}

static ddp_tensor data_fields[2]; /* set by main */

static ddp_loader_desc desc_of(data *d, int64_t samples, int64_t batch_size, int workers) {
    ddp_loader_desc desc = DDP_ZERO;
    desc.sampler.dataset_size = samples;
    desc.sampler.seed = 7;
    desc.batch_size = batch_size;
    desc.fields = data_fields;
    desc.field_count = 2;
    desc.fetch = data_fetch;
    desc.fetch_user = d;
    desc.worker_count = workers;
    return desc;
}

/* The batch has the next samples of the sampler, with their contents. */
static void check_batch(const ddp_batch *b, ddp_sampler *s, int64_t batch_size) {
    int64_t count = 0;
    for (; count < batch_size; count++) {
        int is_padding;
        int64_t index = ddp_sampler_next(s, &is_padding), number;
        float numbers[3];
        if (index < 0) break;
        assert_true(count < b->count);
        assert_int_equal(b->indices[count], index);
        assert_int_equal(b->is_padding[count], is_padding);
        memcpy(&number, (char *)b->fields[0].data + 8 * count, 8);
        memcpy(numbers, (char *)b->fields[1].data + 12 * count, 12);
        assert_int_equal(number, index);
        assert_true(numbers[0] == (float)index && numbers[1] == (float)(2 * index) && numbers[2] == -1);
    }
    assert_int_equal(b->count, count);
    assert_int_equal(b->fields[0].ndim, 1);
    assert_int_equal(b->fields[0].shape[0], count);
    assert_int_equal(b->fields[0].dtype, DDP_I64);
    assert_int_equal(b->fields[1].ndim, 2);
    assert_int_equal(b->fields[1].shape[0], count);
    assert_int_equal(b->fields[1].shape[1], 3);
    assert_int_equal(b->fields[1].dtype, DDP_F32);
}

//== order ==================================================================================================

static void test_order(void **state) {
    static const int64_t sizes[] = {1, 7, 64, 300};
    data d;
    (void)state;
    data_init(&d);
    for (int workers = -1; workers <= 5; workers++)
        for (int k = 0; k < COUNT(sizes); k++) {
            ddp_loader_desc desc = desc_of(&d, 211, sizes[k], workers);
            ddp_loader_stats stats;
            ddp_loader *l;
            ddp_sampler s;
            ddp_batch b;
            desc.prefetch = k == 0 ? 0 : k;
            desc.sampler.num_replicas = 3;
            desc.sampler.rank = workers < 0 ? 0 : workers % 3;
            desc.sampler.no_pad = k == 2;
            desc.sampler.shuffle = k == 1 ? DDP_SHUFFLE_HASHED : DDP_SHUFFLE_TORCH;
            OK(ddp_sampler_init(&s, &desc.sampler));
            OK(ddp_loader_create(&l, &desc));
            for (uint64_t epoch = 0; epoch < 3; epoch++) {
                int64_t batches = (ddp_sampler_length(&s) + sizes[k] - 1) / sizes[k];
                /* A new one is in epoch 0. */
                if (epoch) {
                    OK(ddp_loader_set_epoch(l, epoch));
                    ddp_sampler_set_epoch(&s, epoch);
                }
                for (int64_t i = 0; i < batches; i++) {
                    assert_int_equal(ddp_loader_length(l), batches - i);
                    OK(ddp_loader_next(l, &b));
                    check_batch(&b, &s, sizes[k]);
                }
                for (int again = 0; again < 2; again++) {
                    assert_int_equal(ddp_loader_length(l), 0);
                    OK(ddp_loader_next(l, &b));
                    assert_int_equal(b.count, 0);
                }
            }
            OK(ddp_loader_get_stats(l, &stats));
            assert_int_equal(stats.samples, 3 * ddp_sampler_length(&s));
            assert_int_equal(stats.batches, 3 * ((ddp_sampler_length(&s) + sizes[k] - 1) / sizes[k]));
            assert_true(stats.fetch_seconds > 0 && stats.wait_seconds >= 0);
            ddp_loader_destroy(l);
            ddp_sampler_free(&s);
        }
}

static ddp_result fetch_all_fields(void *user, int64_t index, void *const *fields) {
    (void)user;
    for (int f = 0; f < DDP_LOADER_FIELDS; f++) {
        int32_t value = (int32_t)(100 * index + f);
        memcpy(fields[f], &value, sizeof value);
    }
    return DDP_OK;
}

/* A loader with the maximum number of fields. */
static void test_most_fields(void **state) {
    enum { SAMPLES = 20, BATCH = 6 };
    ddp_tensor fields[DDP_LOADER_FIELDS];
    ddp_loader_desc desc = DDP_ZERO;
    ddp_loader *l;
    ddp_batch b;
    (void)state;
    memset(fields, 0, sizeof fields);
    for (int f = 0; f < DDP_LOADER_FIELDS; f++) fields[f].dtype = DDP_I32;
    desc.sampler.dataset_size = SAMPLES;
    desc.batch_size = BATCH;
    desc.fields = fields;
    desc.field_count = DDP_LOADER_FIELDS;
    desc.fetch = fetch_all_fields;
    OK(ddp_loader_create(&l, &desc));
    for (int64_t seen = 0; seen < SAMPLES; seen += b.count) {
        OK(ddp_loader_next(l, &b));
        assert_true(b.count > 0);
        for (int64_t i = 0; i < b.count; i++)
            for (int f = 0; f < DDP_LOADER_FIELDS; f++)
                assert_int_equal(((const int32_t *)b.fields[f].data)[i], 100 * b.indices[i] + f);
    }
    ddp_loader_destroy(l);
}

static ddp_result fetch_key(void *user, int64_t index, uint64_t epoch, void *const *fields) {
    uint64_t key = ddp_seed(7, epoch, index, *(const uint64_t *)user);
    memcpy(fields[0], &key, sizeof key);
    return DDP_OK;
}

/* fetch_epoch receives the epoch of the batch: with any workers, after a jump to another epoch, which
   discards prefetched batches, and after a load. */
static void test_epoch_of_a_fetch(void **state) {
    enum { SAMPLES = 50, BATCH = 4 };
    static const uint64_t epochs[] = {0, 3, 1ull << 40, 2};
    const ddp_tensor field = {NULL, DDP_U64, 0, {0}};
    uint64_t stream = 5, epoch = 0;
    (void)state;
    for (int workers = -1; workers <= 4; workers += 5) {
        ddp_loader_desc desc = DDP_ZERO;
        ddp_sampler_state saved;
        ddp_loader *l;
        ddp_batch b;
        desc.sampler.dataset_size = SAMPLES;
        desc.batch_size = BATCH;
        desc.fields = &field;
        desc.field_count = 1;
        desc.fetch_epoch = fetch_key;
        desc.fetch_user = &stream;
        desc.worker_count = workers;
        OK(ddp_loader_create(&l, &desc));
        for (int jump = 0; jump < 5; jump++) {
            if (jump == 4) /* the state saved in epoch 3 */
                OK(ddp_loader_load(l, &saved));
            else
                OK(ddp_loader_set_epoch(l, epochs[jump]));
            epoch = epochs[jump == 4 ? 1 : jump];
            for (int batches = 0; batches < 3; batches++) {
                OK(ddp_loader_next(l, &b));
                assert_int_equal(b.count, BATCH);
                for (int64_t i = 0; i < b.count; i++)
                    assert_true(((const uint64_t *)b.fields[0].data)[i]
                                == ddp_seed(7, epoch, b.indices[i], 5));
            }
            if (jump == 1) OK(ddp_loader_save(l, &saved));
        }
        ddp_loader_destroy(l);
    }
}

static int compare_keys(const void *left, const void *right) {
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

/* Keys of neighbouring arguments differ, and each argument changes about half of the bits. */
static void test_seed(void **state) {
    enum { SIDE = 12, KEYS = SIDE * SIDE * SIDE * SIDE };
    static uint64_t keys[KEYS];
    const uint64_t key = ddp_seed(1, 2, 3, 4);
    const uint64_t changed[] = {ddp_seed(2, 2, 3, 4), ddp_seed(1, 3, 3, 4), ddp_seed(1, 2, 4, 4),
                                ddp_seed(1, 2, 3, 5), ddp_seed(2, 1, 3, 4), ddp_seed(1, 3, 2, 4)};
    (void)state;
    for (int i = 0; i < KEYS; i++)
        keys[i] = ddp_seed((uint64_t)(i % SIDE), (uint64_t)(i / SIDE % SIDE), i / SIDE / SIDE % SIDE - 2,
                           (uint64_t)(i / SIDE / SIDE / SIDE));
    qsort(keys, KEYS, sizeof *keys, compare_keys);
    for (int i = 1; i < KEYS; i++) assert_true(keys[i] != keys[i - 1]);
    for (int i = 0; i < COUNT(changed); i++) {
        int bits = __builtin_popcountll(key ^ changed[i]);
        if (bits < 16 || bits > 48) fail_msg("argument %d changes %d bits", i, bits);
    }
    assert_true(key == UINT64_C(0x336c3255cbcc01fe)); /* runs of other versions draw the same numbers */
}

/* A batch stays valid until extra_valid_batches + 1 more were returned; prefetched batches use other
   memory. */
static void test_hold(void **state) {
    data d;
    (void)state;
    data_init(&d);
    for (int hold = 1; hold <= 3; hold++) {
        ddp_loader_desc desc = desc_of(&d, 500, 5, hold == 2 ? -1 : 2);
        ddp_batch kept[4], b;
        ddp_sampler s;
        ddp_loader *l;
        desc.extra_valid_batches = hold == 1 ? 0 : hold;
        OK(ddp_loader_create(&l, &desc));
        for (int i = 0; i < 100; i++) {
            OK(ddp_loader_next(l, &b));
            kept[i % 4] = b;
            OK(ddp_sampler_init(&s, &desc.sampler));
            for (int back = hold; back >= 0; back--) {
                if (i < back) continue;
                OK(ddp_sampler_seek(&s, 5 * (i - back)));
                check_batch(&kept[(i - back) % 4], &s, 5);
            }
            ddp_sampler_free(&s);
        }
        ddp_loader_destroy(l);
    }
}

//== places ================================================================================================

/* Random calls of a trainer, in any order, compared with a sampler without threads. */
static void test_places(void **state) {
    uint32_t random = 12345;
    data d;
    (void)state;
    data_init(&d);
    for (int workers = -1; workers <= 4; workers++) {
        ddp_loader_desc desc = desc_of(&d, 95, 4, workers);
        ddp_sampler_state saved, other;
        ddp_loader *l;
        ddp_sampler s;
        ddp_batch b;
        desc.sampler.num_replicas = 2;
        desc.sampler.rank = workers & 1;
        desc.sampler.global_batch = workers == 2 ? 16 : 0;
        OK(ddp_sampler_init(&s, &desc.sampler));
        OK(ddp_loader_create(&l, &desc));
        OK(ddp_loader_save(l, &saved));
        for (int step = 0; step < 400; step++) {
            uint32_t what = (random = random * 1664525 + 1013904223) >> 28;
            int64_t to = (int64_t)((random >> 8) % 14), length = ddp_sampler_length(&s),
                    batches = (length + 3) / 4;
            if (what < 9) {
                OK(ddp_loader_next(l, &b));
                check_batch(&b, &s, 4);
            } else if (what == 9) {
                OK(ddp_loader_set_epoch(l, (uint64_t)to));
                ddp_sampler_set_epoch(&s, (uint64_t)to);
            } else if (what < 12) {
                if (to > batches) {
                    says(ddp_loader_seek(l, to), DDP_ERR_INVALID, "ddp_loader_seek: batch=");
                    continue;
                }
                OK(ddp_loader_seek(l, to));
                OK(ddp_sampler_seek(&s, to * 4 < length ? to * 4 : length));
            } else if (what < 14) {
                OK(ddp_loader_save(l, &saved));
                OK(ddp_sampler_save(&s, &other));
                assert_memory_equal(&saved, &other, sizeof saved);
            } else {
                OK(ddp_loader_load(l, &saved));
                OK(ddp_sampler_load(&s, &saved));
            }
        }
        says(ddp_loader_seek(l, -1), DDP_ERR_INVALID, "batch=-1; use 0 to");
        saved.seed = 8;
        says(ddp_loader_load(l, &saved), DDP_ERR_INVALID, "state has seed=8");
        OK(ddp_loader_next(l, &b)); /* it continues at the same position */
        check_batch(&b, &s, 4);
        ddp_loader_destroy(l);
        ddp_sampler_free(&s);
    }
}

//== tokens ================================================================================================

static char shards[64];

static void put_shards(void) {
    char path[128];
    for (int shard = 0; shard < 3; shard++) {
        int32_t header[256] = {20240520, 1, 200 + 50 * shard};
        FILE *file;
        snprintf(path, sizeof path, "%s/tokens_%d.bin", shards, shard);
        file = fopen(path, "wb");
        assert_non_null(file);
        assert_int_equal(fwrite(header, sizeof header, 1, file), 1);
        for (int i = 0; i < header[2]; i++) {
            uint16_t token = (uint16_t)(1000 * shard + i);
            assert_int_equal(fwrite(&token, 2, 1, file), 1);
        }
        assert_int_equal(fclose(file), 0);
    }
}

enum { CONTEXT = 4, GLOBAL = 8, WINDOW = CONTEXT + 1 };

/* The global batches [from, to) of an epoch from W loaders, appended to out; state: the start, then the
   end. Three ranks have blocks of 3, 1 and 4 samples. */
static int global_batches(const source *tokens, int world_size, int from, int to, ddp_sampler_state *state,
                          int32_t *out) {
    const double weights[3] = {3, 1, 4};
    ddp_loader *l[4];
    int count = 0;
    for (int rank = 0; rank < world_size; rank++) {
        ddp_loader_desc desc = DDP_ZERO;
        if (world_size == 3) desc.sampler.weights = weights;
        desc.sampler.dataset_size = tokens->count;
        desc.sampler.global_batch = GLOBAL;
        desc.sampler.num_replicas = world_size;
        desc.sampler.rank = rank;
        desc.fields = &tokens->sample;
        desc.field_count = 1;
        desc.fetch = source_fetch;
        desc.fetch_user = (void *)(uintptr_t)tokens;
        desc.worker_count = 1 + rank % 2;
        OK(ddp_loader_create(&l[rank], &desc)); /* batch_size 0: the rank's block of a global batch */
        OK(from ? ddp_loader_load(l[rank], state) : ddp_loader_set_epoch(l[rank], 3));
    }
    for (int i = from; i < to; i++)
        for (int rank = 0; rank < world_size; rank++) {
            ddp_batch b;
            OK(ddp_loader_next(l[rank], &b));
            assert_int_equal(b.count, world_size == 3 ? (int)weights[rank] : GLOBAL / world_size);
            memcpy(out + count, b.fields[0].data, (size_t)b.count * WINDOW * sizeof *out);
            count += (int)b.count * WINDOW;
        }
    OK(ddp_loader_save(l[world_size - 1], state));
    for (int rank = 0; rank < world_size; rank++) ddp_loader_destroy(l[rank]);
    return count;
}

/* Every world size reads the same windows in the same global batches, and so does a loader that resumes from
   another one. */
static void test_tokens(void **state) {
    static int32_t one[16 * GLOBAL * WINDOW], many[16 * GLOBAL * WINDOW];
    ddp_sampler_state end, place;
    char pattern[128];
    source tokens;
    int batches, count;
    (void)state;
    put_shards();
    snprintf(pattern, sizeof pattern, "%s/tokens_*.bin", shards);
    OK(source_open_tokens(&tokens, pattern, CONTEXT));
    assert_int_equal(tokens.count, 49 + 62 + 74);
    batches = 12;
    count = global_batches(&tokens, 1, 0, batches, &end, one);
    for (int i = 0; i < count; i += WINDOW) /* a window is inside one shard */
        for (int k = 1; k < WINDOW; k++) assert_int_equal(one[i + k], one[i] + k);
    for (int w = 2; w <= 4; w++) {
        assert_int_equal(global_batches(&tokens, w, 0, batches, &place, many), count);
        assert_memory_equal(many, one, (size_t)count * sizeof *one);
        assert_int_equal(place.position, end.position);
    }
    for (int w = 1; w <= 4; w++)
        for (int then = 1; then <= 4; then++) {
            int first = global_batches(&tokens, w, 0, 5, &place, many);
            assert_int_equal(first + global_batches(&tokens, then, 5, batches, &place, many + first), count);
            assert_memory_equal(many, one, (size_t)count * sizeof *one);
        }
    source_close(&tokens);
}

//== failures ==============================================================================================

static void test_failures(void **state) {
    data d;
    (void)state;
    for (int workers = -1; workers <= 4; workers++)
        for (int silent = 0; silent < 2; silent++) {
            ddp_loader_desc desc;
            ddp_loader *l;
            ddp_sampler s;
            ddp_batch b;
            data_init(&d);
            if (silent && workers < 0) continue; /* the caller's thread can have a line of its own */
            desc = desc_of(&d, 120, 40, workers);
            desc.sampler.no_shuffle = 1;
            d.fails[0] = 79, d.fail_count[0] = 1; /* of batch 1, the last; 60 twice, and it is first */
            d.fails[1] = 60, d.fail_count[1] = 2;
            d.fails[2] = 80, d.fail_count[2] = 1; /* of batch 2, the first */
            d.silent = silent;
            OK(ddp_sampler_init(&s, &desc.sampler));
            OK(ddp_loader_create(&l, &desc));
            OK(ddp_loader_next(l, &b));
            check_batch(&b, &s, 40);
            for (int time = 0; time < 2; time++) {
                says(ddp_loader_next(l, &b), DDP_ERR_CORRUPT,
                     silent ? "sample 60: DDP_ERR_CORRUPT" : "sample 60: the disk says no to 1");
                assert_true(strstr(ddp_last_error(), "sample 60") == ddp_last_error());
                assert_int_equal(b.count, 0);
                assert_int_equal(ddp_loader_length(l), 2);
            }
            /* It was after sample 60, in a piece that no worker has started. */
            if (d.fail_count[0]) says(ddp_loader_next(l, &b), DDP_ERR_CORRUPT, "sample 79: ");
            OK(ddp_loader_next(l, &b));
            check_batch(&b, &s, 40);
            says(ddp_loader_next(l, &b), DDP_ERR_CORRUPT,
                 silent ? "sample 80: DDP_ERR_CORRUPT" : "sample 80: the disk says no to 2");
            OK(ddp_loader_next(l, &b));
            check_batch(&b, &s, 40);
            OK(ddp_loader_next(l, &b));
            assert_int_equal(b.count, 0);
            ddp_loader_destroy(l);
            ddp_sampler_free(&s);
        }
}

/* Two workers fetch two pieces of one batch. The earlier sample fails first, the later one second. The error
   names the earlier one. */
enum { EARLY = 3, LATE = 100 };
typedef struct race {
    int late_began, early_over;
} race;

static ddp_result race_fetch(void *user, int64_t index, void *const *fields) {
    race *r = (race *)user;
    (void)fields;
    if (index == EARLY) {
        while (!__atomic_load_n(&r->late_began, __ATOMIC_SEQ_CST)) usleep(1000);
        __atomic_store_n(&r->early_over, 1, __ATOMIC_SEQ_CST);
        return ddp_fail(DDP_ERR_CORRUPT, "early");
    }
    if (index == LATE) {
        __atomic_store_n(&r->late_began, 1, __ATOMIC_SEQ_CST);
        while (!__atomic_load_n(&r->early_over, __ATOMIC_SEQ_CST)) usleep(1000);
        usleep(100000); /* the loader notes the earlier failure */
        return ddp_fail(DDP_ERR_CORRUPT, "late");
    }
    return DDP_OK;
}

static void test_first_failure_is_named(void **state) {
    race r = {0, 0};
    ddp_loader_desc desc = desc_of(NULL, 256, 256, 2); /* pieces of 64 */
    ddp_loader *l;
    ddp_batch b;
    (void)state;
    desc.sampler.no_shuffle = 1;
    desc.fetch = race_fetch;
    desc.fetch_user = &r;
    OK(ddp_loader_create(&l, &desc));
    says(ddp_loader_next(l, &b), DDP_ERR_CORRUPT, "sample 3: early");
    ddp_loader_destroy(l);
}

/* An allocator that counts, and runs out of memory. */
typedef struct memory {
    pthread_mutex_t lock;
    int live, calls, room;
} memory;

static void *memory_alloc(size_t size_bytes, void *user) {
    memory *m = (memory *)user;
    int may;
    pthread_mutex_lock(&m->lock);
    may = m->calls++ < m->room;
    m->live += may;
    pthread_mutex_unlock(&m->lock);
    return may ? malloc(size_bytes) : NULL;
}

static void memory_free(void *at, void *user) {
    memory *m = (memory *)user;
    free(at);
    pthread_mutex_lock(&m->lock);
    m->live--;
    pthread_mutex_unlock(&m->lock);
}

static int memory_live(memory *m) {
    int live;
    pthread_mutex_lock(&m->lock);
    live = m->live;
    pthread_mutex_unlock(&m->lock);
    return live;
}

static void memory_init(memory *m, ddp_loader_desc *desc, int room) {
    memset(m, 0, sizeof *m);
    pthread_mutex_init(&m->lock, NULL);
    m->room = room;
    desc->alloc_fn = memory_alloc;
    desc->free_fn = memory_free;
    desc->user = m;
}

/* A fetch that blocks is named. The loader waits again, seeks elsewhere, and is destroyed without it. */
static void test_blocked(void **state) {
    static data d; /* outlive the loader */
    static memory m;
    (void)state;
    for (int workers = 1; workers <= 3; workers++)
        for (int elsewhere = 0; elsewhere < 2; elsewhere++) {
            ddp_loader_desc desc;
            ddp_loader *l;
            ddp_sampler s;
            ddp_batch b;
            data_init(&d);
            desc = desc_of(&d, 60, 10, workers);
            desc.sampler.no_shuffle = 1;
            desc.timeout_ms = 100;
            memory_init(&m, &desc, 100);
            OK(ddp_sampler_init(&s, &desc.sampler));
            OK(ddp_loader_create(&l, &desc));
            data_blocks(&d, 13);
            /* A slow machine. */
            for (ddp_result result; (result = ddp_loader_next(l, &b)) != DDP_OK;)
                assert_int_equal(result, DDP_ERR_TIMEOUT);
            check_batch(&b, &s, 10);
            data_await_blocked(&d);
            for (int time = 0; time < 2; time++)
                says(ddp_loader_next(l, &b), DDP_ERR_TIMEOUT,
                     "sample 13: timed out after 100 ms: fetch has not returned");
            if (elsewhere) {
                OK(ddp_loader_seek(l, 3));
                OK(ddp_sampler_seek(&s, 30));
                says(ddp_loader_next(l, &b), DDP_ERR_TIMEOUT, "sample 13");
            }
            data_blocks(&d, -1);
            for (int i = elsewhere ? 3 : 1; i < 6; i++) {
                for (ddp_result result; (result = ddp_loader_next(l, &b)) != DDP_OK;)
                    assert_int_equal(result, DDP_ERR_TIMEOUT);
                check_batch(&b, &s, 10);
            }
            OK(ddp_loader_next(l, &b));
            assert_int_equal(b.count, 0);

            data_blocks(&d, 2);
            OK(ddp_loader_set_epoch(l, 1));
            data_await_blocked(&d);
            says(ddp_loader_next(l, &b), DDP_ERR_TIMEOUT, "sample 2:");
            ddp_loader_destroy(l);
            assert_true(memory_live(&m) > 0); /* the fetch still writes */
            data_blocks(&d, -1);
            /* the blocked thread frees it; or the watchdog ends this test */
            while (memory_live(&m)) usleep(1000);
            ddp_sampler_free(&s);
        }
}

//== memory and threads ====================================================================================

static int thread_count(void) {
    DIR *tasks = opendir("/proc/self/task");
    int count = 0;
    assert_non_null(tasks);
    for (struct dirent *e; (e = readdir(tasks)) != NULL;) count += e->d_name[0] != '.';
    closedir(tasks);
    return count;
}

/* Counts the running threads: a joined thread can be in the list for a moment. */
static void check_threads(int wanted) {
    while (thread_count() != wanted) usleep(1000);
}

static void test_memory(void **state) {
    int threads = thread_count();
    data d;
    (void)state;
    data_init(&d);
    for (int room = 0;; room++) {
        ddp_loader_desc desc = desc_of(&d, 300, 16, 3);
        memory m;
        ddp_loader *l;
        ddp_batch b;
        size_t before = 0;
        memory_init(&m, &desc, room);
        if (ddp_loader_create(&l, &desc) != DDP_OK) {
            says(DDP_ERR_NO_MEMORY, DDP_ERR_NO_MEMORY, "bytes");
            names("ddp_loader_create");
            assert_null(l);
            assert_int_equal(memory_live(&m), 0);
            check_threads(threads);
            assert_true(room < 10);
            continue;
        }
        assert_true(room >= 3);
        check_threads(threads + 3);
        for (uint64_t epoch = 0; epoch < 4; epoch++) {
            OK(ddp_loader_set_epoch(l, epoch));
            do OK(ddp_loader_next(l, &b));
            while (b.count);
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
            if (epoch == 0)
                before = mallinfo2().uordblks + mallinfo2().hblkhd;
            else
                assert_int_equal(mallinfo2().uordblks + mallinfo2().hblkhd, before);
#endif
        }
        (void)before;
        assert_int_equal(m.calls, room);
        assert_int_equal(thread_count(), threads + 3);
        ddp_loader_destroy(l);
        assert_int_equal(memory_live(&m), 0);
        check_threads(threads);
        break;
    }
    ddp_loader_destroy(NULL);
}

/* Batches of a group use the pinned memory of its device, and return it there. */
static int pinned_live, pinned_fails;
static ddp_result pinned_alloc(ddp_group *group, size_t size_bytes, void **out) {
    *out = NULL;
    if (pinned_fails) return ddp_fail(DDP_ERR_ENGINE, "no pinned memory is left");
    assert_non_null(group);
    *out = aligned_alloc(64, (size_bytes + 63) / 64 * 64);
    pinned_live++;
    return *out ? DDP_OK : DDP_ERR_NO_MEMORY;
}
static void pinned_free(void *at) {
    free(at);
    pinned_live--;
}

static void test_pinned(void **state) {
    ddp_device device = *ddp_device_cpu();
    ddp_group_desc group_desc = DDP_ZERO;
    ddp_loader_desc desc;
    ddp_group *group;
    ddp_loader *l;
    ddp_sampler s;
    ddp_batch b;
    data d;
    (void)state;
    data_init(&d);
    desc = desc_of(&d, 30, 8, 2);
    group_desc.init_method = "self://";
    for (int pinned = 0; pinned < 2; pinned++) {
        device.alloc_pinned = pinned ? pinned_alloc : NULL;
        device.free_pinned = pinned ? pinned_free : NULL;
        group_desc.device = &device;
        OK(ddp_group_create(&group, &group_desc));
        desc.group = group;
        OK(ddp_sampler_init(&s, &desc.sampler));
        OK(ddp_loader_create(&l, &desc));
        assert_int_equal(pinned_live, pinned);
        for (int i = 0; i < 4; i++) {
            OK(ddp_loader_next(l, &b));
            check_batch(&b, &s, 8);
        }
        ddp_loader_destroy(l);
        assert_int_equal(pinned_live, 0);
        pinned_fails = 1;
        if (pinned) says(ddp_loader_create(&l, &desc), DDP_ERR_ENGINE, "no pinned memory is left");
        pinned_fails = 0;
        ddp_sampler_free(&s);
        ddp_group_destroy(group);
    }
}

//== wrong descs ===========================================================================================

static void test_refused(void **state) {
    ddp_loader_desc good, d;
    ddp_tensor t[2];
    ddp_sampler_state place;
    ddp_loader *l;
    ddp_batch b;
    data set;
    (void)state;
    data_init(&set);
    good = desc_of(&set, 10, 2, 1);
#define REFUSED(change, words)                                   \
    do {                                                         \
        d = good;                                                \
        memcpy(t, data_fields, sizeof t);                        \
        d.fields = t;                                            \
        change;                                                  \
        says(ddp_loader_create(&l, &d), DDP_ERR_INVALID, words); \
        names("ddp_loader_create");                              \
        assert_null(l);                                          \
    } while (0)
    REFUSED(d.fetch = NULL, "ddp_loader_create: fetch is NULL");
    REFUSED(d.fetch_epoch = fetch_key, "ddp_loader_create: set fetch or fetch_epoch, not both");
    REFUSED(d.sampler.dataset_size = 0, "sampler.dataset_size=0; use 1 or more");
    REFUSED(d.sampler.dataset_size = -3, "sampler.dataset_size=-3");
    REFUSED(d.sampler.rank = 2, "rank=2");
    REFUSED(d.sampler.global_batch = 3; d.sampler.num_replicas = 2, "global_batch=3");
    REFUSED(d.batch_size = 0, "batch_size=0");
    REFUSED(d.batch_size = 0; d.sampler.global_batch = -2, "global_batch=-2");
    const double none[1] = {0};
    REFUSED(d.batch_size = 0; d.sampler.global_batch = 2; d.sampler.weights = none, "weights[0]=0");
    REFUSED(d.batch_size = -1, "batch_size=-1");
    REFUSED(d.batch_size = INT64_MAX / 4, "not fit in memory");
    REFUSED(d.fields = NULL, "fields is NULL");
    REFUSED(d.field_count = 0, "field_count=0; use 1 to 8");
    REFUSED(d.field_count = 9, "field_count=9");
    REFUSED(t[1].dtype = DDP_DTYPE_DEFAULT, "fields[1].dtype=0");
    REFUSED(t[1].dtype = (ddp_dtype)99, "fields[1].dtype=99");
    REFUSED(t[0].ndim = 8, "fields[0].ndim=8; use 0 to 7");
    REFUSED(t[0].ndim = -1, "fields[0].ndim=-1");
    REFUSED(t[1].shape[0] = 0, "fields[1].shape has an entry below 1");
    REFUSED(t[1].shape[0] = -2, "fields[1].shape has an entry below 1");
    REFUSED(t[1].ndim = 2; t[1].shape[0] = t[1].shape[1] = INT64_C(1) << 40,
                           "fields[1].shape has an entry below 1, or its product overflows");
    REFUSED(t[1].shape[0] = INT64_C(1) << 60, "fields[1] do not fit in memory");
    REFUSED(d.worker_count = -2, "worker_count=-2; use -1 to 64");
    REFUSED(d.worker_count = 65, "worker_count=65");
    REFUSED(d.prefetch = -1, "prefetch=-1");
    REFUSED(d.extra_valid_batches = 65537, "extra_valid_batches=65537; use 0 to 65536");
    REFUSED(d.timeout_ms = -1, "timeout_ms=-1");
    REFUSED(d.alloc_fn = memory_alloc, "set both alloc_fn and free_fn");
    says(ddp_loader_create(NULL, &good), DDP_ERR_INVALID, "out or desc is NULL");
    says(ddp_loader_create(&l, NULL), DDP_ERR_INVALID, "out or desc is NULL");
    says(ddp_loader_next(NULL, &b), DDP_ERR_INVALID, "ddp_loader_next: loader or out is NULL");
    says(ddp_loader_set_epoch(NULL, 1), DDP_ERR_INVALID, "loader is NULL");
    says(ddp_loader_seek(NULL, 1), DDP_ERR_INVALID, "loader is NULL");
    says(ddp_loader_save(NULL, &place), DDP_ERR_INVALID, "loader is NULL");
    says(ddp_loader_load(NULL, &place), DDP_ERR_INVALID, "loader is NULL");
    says(ddp_loader_get_stats(NULL, NULL), DDP_ERR_INVALID, "loader or stats is NULL");
    assert_int_equal(ddp_loader_length(NULL), 0);
    OK(ddp_loader_create(&l, &good));
    says(ddp_loader_save(l, NULL), DDP_ERR_INVALID, "state is NULL");
    names("ddp_loader_save");
    says(ddp_loader_load(l, NULL), DDP_ERR_INVALID, "state is NULL");
    names("ddp_loader_load");
    OK(ddp_loader_save(l, &place));
    place.seed++;
    says(ddp_loader_load(l, &place), DDP_ERR_INVALID, "state has seed=");
    names("ddp_loader_load");
    place.seed--;
    place.position = -1;
    says(ddp_loader_load(l, &place), DDP_ERR_CORRUPT, "position=-1");
    names("ddp_loader_load");
    says(ddp_loader_seek(l, -1), DDP_ERR_INVALID, "batch=-1; use 0 to 5");
    names("ddp_loader_seek");
    ddp_loader_destroy(l);
}

static int make_folder(void **state) {
    (void)state;
    snprintf(shards, sizeof shards, "loader.XXXXXX");
    return mkdtemp(shards) ? 0 : -1;
}

static int remove_folder(void **state) {
    char command[128];
    (void)state;
    snprintf(command, sizeof command, "rm -rf %s", shards);
    return system(command);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order),    cmocka_unit_test(test_most_fields),
        cmocka_unit_test(test_hold),     cmocka_unit_test(test_places),
        cmocka_unit_test(test_tokens),   cmocka_unit_test(test_first_failure_is_named),
        cmocka_unit_test(test_failures), cmocka_unit_test(test_blocked),
        cmocka_unit_test(test_memory),   cmocka_unit_test(test_pinned),
        cmocka_unit_test(test_refused),  cmocka_unit_test(test_epoch_of_a_fetch),
        cmocka_unit_test(test_seed)};
    data_fields[0].dtype = DDP_I64;
    data_fields[1].dtype = DDP_F32;
    data_fields[1].ndim = 1;
    data_fields[1].shape[0] = 3;
    watchdog_start(50);
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
