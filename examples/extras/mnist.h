/*  mnist.h - the images of MNIST or Fashion-MNIST, or synthetic ones of the same shape.

USAGE
    Copy it next to ddp.h and include it after ddp.h. All functions are static. To get the files:
        apt-get install dataset-fashion-mnist
        cp -r /usr/share/datasets/fashion-mnist data && gunzip -r data

EXAMPLE
    mnist data[2];                             // training set, test set
    mnist_open("data", &data[0], &data[1]);    // or mnist_synthetic(4096, 1024, &data[0], &data[1])
    ...                                        // in a rank:
    const ddp_tensor fields[2] = {{NULL, DDP_U8, 1, {MNIST_PIXELS}}, {NULL, DDP_U8, 0, {0}}};
    loader_desc.fields = fields;
    loader_desc.fetch = mnist_fetch;           // a batch: pixels (n, 784), labels (n)
    loader_desc.fetch_user = &data[0];

CONCEPTS
    The images are shared memory: read or make them before ddp_launch, and all ranks of the machine use one
    copy. They are mapped until the program ends.

ERRORS
    As in ddp.h: ddp_result and ddp_last_error().

NOT DONE HERE
    No download, no compressed files, no augmentation.
*/
#ifndef DDP_EXAMPLE_MNIST_H
#define DDP_EXAMPLE_MNIST_H

#ifndef DDP_H
#include "../../ddp.h"
#endif
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MNIST_PIXELS = 28 * 28, MNIST_CLASSES = 10, MNIST_TRAIN = 60000, MNIST_TEST = 10000 };

typedef struct mnist {
    int64_t count;
    const uint8_t *images; /* (count, MNIST_PIXELS) */
    const uint8_t *labels; /* (count); each is below MNIST_CLASSES */
} mnist;

/* Maps a file: a header of header_bytes, then `bytes` of pixels or labels. */
static inline ddp_result mnist__map(const char *folder, const char *name, int64_t header_bytes, int64_t bytes,
                                    const uint8_t **out) {
    char path[1024];
    struct stat info;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    int fits = fd >= 0 && fstat(fd, &info) == 0 && info.st_size == header_bytes + bytes;
    void *file = fits ? mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (fd >= 0) close(fd);
    if (file == MAP_FAILED)
        return ddp_fail(DDP_ERR_INVALID,
                        "%s is missing, or not a file of MNIST; give the folder of its files", path);
    *out = (const uint8_t *)file + header_bytes;
    return DDP_OK;
}

static inline ddp_result mnist__open_set(const char *folder, const char *kind, int64_t count, mnist *out) {
    char name[64];
    out->count = count;
    snprintf(name, sizeof name, "%s-images-idx3-ubyte", kind);
    DDP_TRY(mnist__map(folder, name, 16, count * MNIST_PIXELS, &out->images));
    snprintf(name, sizeof name, "%s-labels-idx1-ubyte", kind);
    DDP_TRY(mnist__map(folder, name, 8, count, &out->labels));
    for (int64_t i = 0; i < count; i++)
        if (out->labels[i] >= MNIST_CLASSES)
            return ddp_fail(DDP_ERR_INVALID, "%s/%s: a label is not below 10; get the file again", folder,
                            name);
    return DDP_OK;
}

/* Maps the uncompressed files in folder: 60,000 images for training, 10,000 for the test. test may be NULL.
   Errors: DDP_ERR_INVALID for a file that is missing, has another size, or has a label above 9. */
static inline ddp_result mnist_open(const char *folder, mnist *train, mnist *test) {
    DDP_TRY(mnist__open_set(folder, "train", MNIST_TRAIN, train));
    return test ? mnist__open_set(folder, "t10k", MNIST_TEST, test) : DDP_OK;
}

/* Makes a data set without files: noise, and a bright stripe of two rows at the height of the label. The
   counts are 1 or more. test may be NULL if test_count is 0. The same counts give the same bits. Errors:
   DDP_ERR_NO_MEMORY. */
static inline ddp_result mnist_synthetic(int64_t train_count, int64_t test_count, mnist *train, mnist *test) {
    int64_t count = train_count + test_count, pixels = count * MNIST_PIXELS;
    void *memory = mmap(NULL, (size_t)(pixels + count), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                        -1, 0);
    uint8_t *images = (uint8_t *)memory, *labels = images + pixels;
    uint32_t random = 1;
    if (memory == MAP_FAILED) return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for the data set");
    for (int64_t i = 0; i < count; i++) labels[i] = (uint8_t)(i % MNIST_CLASSES);
    for (int64_t i = 0; i < pixels; i++) {
        int is_stripe = i % MNIST_PIXELS / 56 == labels[i / MNIST_PIXELS] + 2;
        random = random * 1664525 + 1013904223;
        images[i] = (uint8_t)((random >> 25) + (is_stripe ? 60 : 0));
    }
    train->count = train_count;
    train->images = images;
    train->labels = labels;
    if (!test) return DDP_OK;
    test->count = test_count;
    test->images = images + train_count * MNIST_PIXELS;
    test->labels = labels + train_count;
    return DDP_OK;
}

/* For ddp_loader_desc.fetch, with fetch_user a mnist: copies the pixels of one image, and its label. */
static inline ddp_result mnist_fetch(void *user, int64_t index, void *const *fields) {
    const mnist *data = (const mnist *)user;
    memcpy(fields[0], data->images + index * MNIST_PIXELS, MNIST_PIXELS);
    memcpy(fields[1], data->labels + index, 1);
    return DDP_OK;
}

#endif /* DDP_EXAMPLE_MNIST_H */

/* MIT License: see LICENSE. */
