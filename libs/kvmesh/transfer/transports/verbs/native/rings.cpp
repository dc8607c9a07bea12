// Posting and polling of work requests without a Python call for each. Called with the interpreter's lock released.
//
// Declared here is as much as is used of the ABI between applications and libibverbs: it is that of the inline functions
// of its header, compiled into applications, and the same since the extended queue pairs came (rdma-core 23). Whether an
// address is what it is taken for is checked by the caller before (`pointers.py`).

#include <cstddef>
#include <cstdint>
#include <pthread.h>

namespace {

struct Cq;

struct Context {
    void *device;
    void *before_poll[11];
    int (*poll_cq)(Cq *, int, void *);
};

struct Cq {
    Context *context;
};

struct Qp {
    void *pointers[6];
    uint32_t handle, number, state, type;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t events;
};

struct QpEx {
    Qp base;
    uint64_t mask;
    uint64_t number;
    unsigned flags;
    void *before_write[5];
    void (*write)(QpEx *, uint32_t, uint64_t);
    void (*write_imm)(QpEx *, uint32_t, uint64_t, uint32_t);
    void *sends[4];
    void (*address)(QpEx *, void *, uint32_t, uint32_t);
    void *before_sge[3];
    void (*sge)(QpEx *, uint32_t, uint64_t, uint32_t);
    void *sge_list;
    void (*start)(QpEx *);
    int (*complete)(QpEx *);
};

static_assert(sizeof(void *) == 8, "64 bits");
static_assert(offsetof(Context, poll_cq) == 96, "ibv_context_ops.poll_cq");
static_assert(offsetof(Qp, number) == 52, "ibv_qp.qp_num");
static_assert(offsetof(QpEx, number) == 168, "ibv_qp_ex.wr_id");
static_assert(offsetof(QpEx, flags) == 176, "ibv_qp_ex.wr_flags");
static_assert(offsetof(QpEx, write) == 224, "ibv_qp_ex.wr_rdma_write");
static_assert(offsetof(QpEx, write_imm) == 232, "ibv_qp_ex.wr_rdma_write_imm");
static_assert(offsetof(QpEx, address) == 272, "ibv_qp_ex.wr_set_ud_addr");
static_assert(offsetof(QpEx, sge) == 304, "ibv_qp_ex.wr_set_sge");
static_assert(offsetof(QpEx, start) == 320, "ibv_qp_ex.wr_start");
static_assert(offsetof(QpEx, complete) == 328, "ibv_qp_ex.wr_complete");

struct Row {
    uint64_t source, lkey, target, rkey, nbytes;
};

} // namespace

extern "C" {

// Up to `limit` ibv_wc of 48 bytes each; their number, or the negative error.
int kvmesh_rdma_poll(void *queue, void *found, int limit) {
    Cq *cq = static_cast<Cq *>(queue);
    return cq->context->poll_cq(cq, limit, found);
}

// Plain writes, then one with immediate (already in network order) of 8 bytes; only that one has `flags`. 0 or an error.
int kvmesh_rdma_run(void *pair, const Row *rows, int64_t count, uint64_t inner, uint64_t closing, uint32_t flags,
                    uint64_t entry, uint32_t lkey, uint64_t target, uint32_t rkey, uint32_t immediate) {
    QpEx *qp = static_cast<QpEx *>(pair);
    qp->start(qp);
    qp->number = inner;
    qp->flags = 0;
    for (int64_t i = 0; i < count; i++) {
        const Row &row = rows[i];
        qp->write(qp, static_cast<uint32_t>(row.rkey), row.target);
        qp->sge(qp, static_cast<uint32_t>(row.lkey), row.source, static_cast<uint32_t>(row.nbytes));
    }
    qp->number = closing;
    qp->flags = flags;
    qp->write_imm(qp, rkey, target, immediate);
    qp->sge(qp, lkey, entry, 8);
    return qp->complete(qp);
}

// Writes with immediate to one queue pair, all with `flags`: part p has rows[ends[p-1]..ends[p]), a number and an
// immediate of its own. 0 or an error.
int kvmesh_rdma_writes(void *pair, void *handle, uint32_t remote, uint32_t key, uint32_t flags, const Row *rows,
                       const uint64_t *parts, int64_t count) {
    QpEx *qp = static_cast<QpEx *>(pair);
    int64_t at = 0;
    qp->start(qp);
    qp->flags = flags;
    for (int64_t p = 0; p < count; p++) {
        const uint64_t *part = parts + 3 * p;
        qp->number = part[0];
        for (int64_t end = static_cast<int64_t>(part[2]); at < end; at++) {
            const Row &row = rows[at];
            qp->write_imm(qp, static_cast<uint32_t>(row.rkey), row.target, static_cast<uint32_t>(part[1]));
            qp->address(qp, handle, remote, key);
            qp->sge(qp, static_cast<uint32_t>(row.lkey), row.source, static_cast<uint32_t>(row.nbytes));
        }
    }
    return qp->complete(qp);
}
}
