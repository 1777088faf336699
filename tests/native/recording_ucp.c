/* A stand-in of libucp for processes of one host: it moves bytes by the processor, and writes down what it was asked.
 *
 * It has the functions that native/src/ucx/library.zig loads. Its structs are written after ucp/api/ucp.h of UCX 1.13,
 * not after library.zig, so that a field which lies elsewhere there is seen here. It does not mind which kind of memory
 * it is told: memory of the host passes for memory of a device.
 *
 * What `ucp_init_version` finds in the environment holds for its context:
 *
 *   RECORDING_UCP_LOG=FILE      one line of each call with a kind of memory is appended there
 *   RECORDING_UCP_CUDA=1        it says that it knows memory of CUDA devices
 *   RECORDING_UCP_MAP=-3        registration of such memory fails with this status
 *   RECORDING_UCP_DOMAIN=cuda   no adapter registers such memory, and registration succeeds all the same
 *   RECORDING_UCP_HOLD=FILE     transfers of more than 256 bytes end when this file is gone */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

typedef signed char status_t;
typedef void *status_ptr;

enum { OK = 0, IN_PROGRESS = 1, ERR_CANCELED = -16, ERR_CONNECTION_RESET = -25 };
enum { HOST, CUDA };
enum { DOMAIN_ADAPTER, DOMAIN_CUDA };
enum { HELD_BYTES_MIN = 257 };

typedef struct { uint64_t field_mask; size_t request_size; int thread_mode; uint64_t memory_types; } context_attr;
typedef struct {
    uint64_t field_mask;
    void *address;
    size_t length;
    unsigned flags, prot;
    int memory_type;
} map_params;
typedef struct {
    uint32_t op_attr_mask, flags;
    void *request;
    void (*callback)(void);
    uint64_t datatype;
    void *user_data, *reply_buffer;
    int memory_type;
    void *recv_info;
    void *memh;
} request_params;
typedef struct { uint64_t field_mask; const void *address; } ep_params;

typedef struct { char log[256], hold[256]; int has_cuda, map_status, is_domain_cuda; } context;
typedef struct { context *of; int bell; } worker;
typedef struct { context *of; int is_closed; } endpoint;
typedef struct { uint32_t is_valid; void *address; size_t length; int memory_type; } memory;
/* What a key begins with is UCX's: the memory domains, and the kind of memory. */
typedef struct {
    uint64_t domains;
    uint64_t memory_type;
    uint64_t pid, memory;
} __attribute__((packed)) key;
typedef struct { endpoint *ep; int is_put; void *ours; size_t length; uint64_t theirs; key rkey; } request;

#define PUBLIC __attribute__((visibility("default")))

/* ---- what it was asked ---- */

static void note(context *of, const char *line) {
    if (!of->log[0]) return;
    int fd = open(of->log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return;
    if (write(fd, line, strlen(line)) < 0) perror("recording_ucp");
    close(fd);
}

static void set(char *to, const char *name) {
    const char *value = getenv(name);
    snprintf(to, 256, "%s", value ? value : "");
}

/* ---- the context ---- */

PUBLIC const char *ucp_get_version_string(void) { return "1.13.0-recording"; }

PUBLIC status_t ucp_config_read(const char *prefix, const char *file, void **config) {
    (void)prefix, (void)file;
    *config = malloc(1);
    return OK;
}

PUBLIC status_t ucp_config_modify(void *config, const char *name, const char *value) {
    (void)config, (void)name, (void)value;
    return OK;
}

PUBLIC void ucp_config_release(void *config) { free(config); }

PUBLIC status_t ucp_init_version(unsigned major, unsigned minor, const void *params, void *config, context **out) {
    (void)major, (void)minor, (void)params, (void)config;
    context *one = calloc(1, sizeof *one);
    const char *cuda = getenv("RECORDING_UCP_CUDA"), *map = getenv("RECORDING_UCP_MAP");
    set(one->log, "RECORDING_UCP_LOG");
    set(one->hold, "RECORDING_UCP_HOLD");
    one->has_cuda = cuda && *cuda == '1';
    one->map_status = map ? atoi(map) : OK;
    one->is_domain_cuda = getenv("RECORDING_UCP_DOMAIN") != NULL;
    prctl(PR_SET_PTRACER, -1); /* adapters are stopped by no process either */
    *out = one;
    return OK;
}

PUBLIC void ucp_cleanup(context *one) { free(one); }

PUBLIC status_t ucp_context_query(context *one, context_attr *attr) {
    if (attr->field_mask & 1 << 2) attr->memory_types = 1 << HOST | one->has_cuda << CUDA;
    return OK;
}

PUBLIC void ucp_context_print_info(context *one, FILE *stream) {
    fprintf(stream, "#      resource 0  :  md %d  dev 0  flags -- rc_verbs/rec0:1\n", DOMAIN_ADAPTER);
    if (one->has_cuda) fprintf(stream, "#      resource 1  :  md %d  dev 1  flags -- cuda_copy/cuda\n", DOMAIN_CUDA);
}

/* ---- the worker ---- */

PUBLIC status_t ucp_worker_create(context *of, const void *params, worker **out) {
    (void)params;
    worker *one = calloc(1, sizeof *one);
    one->of = of;
    one->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    *out = one;
    return OK;
}

PUBLIC void ucp_worker_destroy(worker *one) {
    close(one->bell);
    free(one);
}

PUBLIC status_t ucp_worker_get_address(worker *one, void **address, size_t *length) {
    (void)one;
    *length = sizeof(uint64_t);
    *address = calloc(1, *length);
    *(uint64_t *)*address = (uint64_t)getpid();
    return OK;
}

PUBLIC void ucp_worker_release_address(worker *one, void *address) {
    (void)one;
    free(address);
}

PUBLIC status_t ucp_worker_get_efd(worker *one, int *fd) {
    *fd = one->bell;
    return OK;
}

PUBLIC unsigned ucp_worker_progress(worker *one) { return (void)one, 0; }

PUBLIC status_t ucp_worker_arm(worker *one) { return (void)one, OK; }

/* ---- memory ---- */

PUBLIC status_t ucp_mem_map(context *of, const map_params *params, memory **out) {
    int is_told = (params->field_mask & 1 << 4) != 0;
    int memory_type = is_told ? params->memory_type : HOST;
    status_t status = memory_type == CUDA ? (status_t)of->map_status : OK;
    char line[256];
    snprintf(line, sizeof line, "mem_map mask=%#lx kind=%d length=%zu prot=%#x status=%d\n",
             (unsigned long)params->field_mask, is_told ? memory_type : -1, params->length, params->prot, status);
    note(of, line);
    if (status != OK) return status;
    memory *one = calloc(1, sizeof *one); /* stays: keys elsewhere name it */
    *one = (memory){.is_valid = 1, .address = params->address, .length = params->length, .memory_type = memory_type};
    *out = one;
    return OK;
}

PUBLIC status_t ucp_mem_unmap(context *of, memory *one) {
    char line[64];
    snprintf(line, sizeof line, "mem_unmap kind=%d length=%zu\n", one->memory_type, one->length);
    note(of, line);
    __atomic_store_n(&one->is_valid, 0, __ATOMIC_SEQ_CST);
    return OK;
}

PUBLIC status_t ucp_rkey_pack(context *of, memory *one, void **out, size_t *size) {
    int by_adapter = one->memory_type == HOST || !of->is_domain_cuda;
    key *made = malloc(sizeof *made);
    *made = (key){
        .domains = (uint64_t)by_adapter << DOMAIN_ADAPTER | (uint64_t)of->has_cuda << DOMAIN_CUDA,
        .memory_type = (uint64_t)one->memory_type,
        .pid = (uint64_t)getpid(),
        .memory = (uint64_t)one,
    };
    *out = made;
    *size = sizeof *made;
    return OK;
}

PUBLIC void ucp_rkey_buffer_release(void *buffer) { free(buffer); }

PUBLIC status_t ucp_ep_rkey_unpack(endpoint *ep, const void *buffer, key **out) {
    (void)ep;
    *out = malloc(sizeof(key));
    memcpy(*out, buffer, sizeof(key));
    return OK;
}

PUBLIC void ucp_rkey_destroy(key *one) { free(one); }

/* ---- the endpoint ---- */

PUBLIC status_t ucp_ep_create(worker *of, const ep_params *params, endpoint **out) {
    (void)params;
    *out = calloc(1, sizeof **out); /* stays: requests name it */
    (*out)->of = of->of;
    return OK;
}

PUBLIC status_ptr ucp_ep_close_nbx(endpoint *one, const request_params *params) {
    (void)params;
    one->is_closed = 1;
    return NULL;
}

PUBLIC status_ptr ucp_ep_flush_nbx(endpoint *one, const request_params *p) { return (void)one, (void)p, NULL; }

PUBLIC void ucp_ep_print_info(endpoint *one, FILE *stream) {
    (void)one;
    fprintf(stream, "#                 lane[0]:  0:rc_verbs/rec0:1.0 md[0] rma_bw#0\n");
}

/* ---- transfers ---- */

static int copy(uint64_t pid, void *ours, uint64_t theirs, size_t length, int is_put) {
    if (pid == (uint64_t)getpid()) {
        is_put ? memcpy((void *)theirs, ours, length) : memcpy(ours, (void *)theirs, length);
        return 1;
    }
    struct iovec here = {ours, length}, there = {(void *)theirs, length};
    ssize_t n = is_put ? process_vm_writev((pid_t)pid, &here, 1, &there, 1, 0)
                       : process_vm_readv((pid_t)pid, &here, 1, &there, 1, 0);
    return n == (ssize_t)length;
}

static status_t carry(const request *one) {
    uint32_t is_valid = 0;
    if (one->ep->is_closed) return ERR_CANCELED;
    /* As an adapter does, it refuses what is not registered any more. */
    if (!copy(one->rkey.pid, &is_valid, one->rkey.memory, sizeof is_valid, 0) || !is_valid) return ERR_CONNECTION_RESET;
    return copy(one->rkey.pid, one->ours, one->theirs, one->length, one->is_put) ? OK : ERR_CONNECTION_RESET;
}

static int is_held(const request *one) {
    return one->length >= HELD_BYTES_MIN && one->ep->of->hold[0] && access(one->ep->of->hold, F_OK) == 0;
}

static status_ptr begin(const request *asked, const request_params *params) {
    char line[256];
    snprintf(line, sizeof line, "%s mask=%#x kind=%d length=%zu memh=%d theirs=%d\n", asked->is_put ? "put" : "get",
             params->op_attr_mask, params->op_attr_mask & 1 << 6 ? params->memory_type : -1, asked->length,
             params->op_attr_mask & 1 << 8 && params->memh != NULL, (int)asked->rkey.memory_type);
    note(asked->ep->of, line);
    if (!is_held(asked)) return (status_ptr)(intptr_t)carry(asked);
    request *one = malloc(sizeof *one);
    *one = *asked;
    return one;
}

PUBLIC status_ptr ucp_get_nbx(endpoint *ep, void *into, size_t length, uint64_t from, key *rkey,
                              const request_params *p) {
    return begin(&(request){ep, 0, into, length, from, *rkey}, p);
}

PUBLIC status_ptr ucp_put_nbx(endpoint *ep, const void *from, size_t length, uint64_t into, key *rkey,
                              const request_params *p) {
    return begin(&(request){ep, 1, (void *)from, length, into, *rkey}, p);
}

PUBLIC status_t ucp_request_check_status(request *one) {
    return is_held(one) && !one->ep->is_closed ? IN_PROGRESS : carry(one);
}

PUBLIC void ucp_request_free(request *one) { free(one); }
