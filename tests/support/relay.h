/*  relay.h - a backend that passes every call to another group, without access to peers' memory: layers then
    have to send data.

    ddp_group *far;
    relay_over(&far, group);      collective; destroy far before group
    relay_over_device(&far, group, &device);      its memory is that of the device, which is the host's */
#ifndef DDP_TEST_RELAY_H
#define DDP_TEST_RELAY_H

static ddp_result relay_open(ddp_group *group, void **state) {
    *state = ddp_group_backend_user(group);
    return DDP_OK;
}

static int relay_allocs, relay_runs; /* of group memory, and calls, on any thread */
/* all-gathers of device memory, by rank, without those of ddp_agree */
static int relay_gathers[DDP_MAX_LOCAL_RANKS];

static ddp_result relay_run(ddp_group *group, void *state, const ddp_call *call) {
    int *gathers = &relay_gathers[ddp_rank(group)];
    if (call->kind == DDP_CALL_ALL_GATHER && !(call->flags & DDP_CALL_HOST_MEMORY))
        __atomic_add_fetch(gathers, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&relay_runs, 1, __ATOMIC_RELAXED);
    return ddp_group_call((ddp_group *)state, call, NULL);
}

/* one after the other: the group below has one caller at a time */
typedef struct relay_memory {
    ddp_group *below;
    size_t size_bytes;
    void *memory;
} relay_memory;

static ddp_result relay_take(ddp_group *group, void *argument) {
    relay_memory *m = (relay_memory *)argument;
    (void)group;
    if (!m->memory) __atomic_add_fetch(&relay_allocs, 1, __ATOMIC_RELAXED);
    return m->memory ? ddp_group_free(m->below, m->memory)
                     : ddp_group_alloc(m->below, m->size_bytes, &m->memory);
}

static ddp_result relay_alloc(ddp_group *group, void *state, size_t size_bytes, void **out) {
    relay_memory m = DDP_ZERO;
    ddp_result result;
    m.below = (ddp_group *)state;
    m.size_bytes = size_bytes;
    result = ddp_group_enqueue(group, relay_take, &m, NULL);
    *out = m.memory;
    return result;
}

static ddp_result relay_free(ddp_group *group, void *state, void *memory) {
    relay_memory m = DDP_ZERO;
    m.below = (ddp_group *)state;
    m.memory = memory;
    return ddp_group_enqueue(group, relay_take, &m, NULL);
}

static ddp_result relay_status(const ddp_group *group, void *state) {
    (void)group;
    return ddp_group_cause((ddp_group *)state);
}

static void relay_poison(ddp_group *group, void *state, ddp_result cause, const char *text) {
    (void)group;
    ddp_group_poison((ddp_group *)state, cause, text);
}

static void relay_close(ddp_group *group, void *state) {
    (void)group;
    (void)state;
}

static ddp_result relay_over_device(ddp_group **out, ddp_group *group, const ddp_device *device) {
    static const ddp_backend relay = {
        "relay",     relay_open, relay_run,    NULL,         NULL,        NULL, NULL,
        relay_alloc, relay_free, relay_status, relay_poison, relay_close, 0,    DDP_ORDER_TREE,
        NULL,        NULL,       NULL,         NULL,         NULL,
    };
    ddp_group_desc desc = DDP_ZERO;
    desc.backend = &relay;
    desc.device = device;
    return ddp_group_create_on(out, group, &desc);
}

static ddp_result relay_over(ddp_group **out, ddp_group *group) {
    return relay_over_device(out, group, NULL);
}

#endif
