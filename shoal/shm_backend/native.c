/* All-reduces of collectives.py with no Python between their steps: an interpreter takes longer for a small tensor than
 * its numbers do, and must cut a large one into slices that are too large for the processor's caches.
 *
 * In one pass every rank adds up all of a slice; in two it adds up its piece of it, and all read the sums:
 *
 *     turn                  0         1                  2                        3                         4
 *     one pass, rank 0      show a0   show b0, take a    show c0, take b          take c
 *     two passes, rank 0    show a0   show b0, sum A     show c0, read a, sum B   read b, sum C             read c
 *
 * A step reads what others have shown in an earlier turn, so it seldom waits. Words, slots and phases are exchange.py's,
 * and so is its promise: who publishes phase p has read all up to p - LAG. It decides nothing: where a step cannot be
 * made, or another rank is in another call, it says how far it has come, and Python waits, looks after the others'
 * health, and raises.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define VERSION 1 /* see native.py */
#define MOST_RANKS 64
#define LINE_BYTES 64
#define LOOKS 64          /* between two looks at the clock */
#define HELD_BYTES 32768  /* up to here giving back the interpreter's lock takes longer than it is worth */

typedef struct {
    PyObject_HEAD
    int rank, size, yields; /* the processor to others while it waits */
    int64_t phase_at, sleeps_at, ring_at, ring, slots, slot_bytes, ahead; /* as exchange.py counts */
    int64_t slice_bytes, one_pass_bytes;                                /* the same on all ranks */
    int64_t spin_ns;
    int64_t *words[MOST_RANKS];                                         /* each rank's; of ours alone we write */
    char *numbers[MOST_RANKS];                                          /* each rank's slots */
    int64_t wanted;                                                     /* the phase that the next step needs of all */
    int of_this_call;                                                   /* and whether they must be in this call there */
} Express;

enum { FLOAT_SUM, FLOAT_MEAN, DOUBLE_SUM, DOUBLE_MEAN, CODES };

/* One call on its way. */
typedef struct {
    char *own;
    int64_t bytes, word, first, slices;
    int code, passes;
} Call;

/* --- numbers */

#define REDUCTION(real)                                                                                                 \
    static void reduce_##real(real *out, char *const *parts, int size, int mean, int64_t n) {                           \
        for (int r = 1; r < size; r++) {                                                                                \
            const real *a = r == 1 ? (const real *)parts[0] : out, *b = (const real *)parts[r];                         \
            for (int64_t i = 0; i < n; i++) out[i] = a[i] + b[i];                                                       \
        }                                                                                                               \
        for (int64_t i = 0; mean && i < n; i++) out[i] /= (real)size;                                                   \
    }

REDUCTION(float)
REDUCTION(double)

/* `out` = parts[0] + parts[1] + ... in this order; it may be none of them but the first two. */
static void reduce(const Express *self, const Call *call, char *out, char *const *parts, int64_t bytes) {
    int mean = call->code == FLOAT_MEAN || call->code == DOUBLE_MEAN;
    if (call->code <= FLOAT_MEAN)
        reduce_float((float *)out, parts, self->size, mean, bytes / (int64_t)sizeof(float));
    else
        reduce_double((double *)out, parts, self->size, mean, bytes / (int64_t)sizeof(double));
}

/* --- what all ranks see */

/* Have all others published this phase? */
static int reached(const Express *self, int64_t phase) {
    for (int r = 0; r < self->size; r++)
        if (r != self->rank && __atomic_load_n(&self->words[r][self->phase_at], __ATOMIC_ACQUIRE) < phase) return 0;
    return 1;
}

/* And are they in this call? */
static int arrived(const Express *self, int64_t phase, int64_t word) {
    if (!reached(self, phase)) return 0;
    for (int r = 0; r < self->size; r++)
        if (r != self->rank && self->words[r][self->ring_at + phase % self->ring] != word) return 0;
    return 1;
}

static void publish(const Express *self, int64_t phase, int64_t word) {
    int64_t *mine = self->words[self->rank];
    mine[self->ring_at + phase % self->ring] = word;
    __atomic_store_n(&mine[self->phase_at], phase, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#ifdef __linux__
    for (int r = 0; r < self->size; r++)
        if (r != self->rank && __atomic_load_n(&self->words[r][self->sleeps_at], __ATOMIC_RELAXED)) {
            syscall(SYS_futex, &mine[self->phase_at], FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
            return;
        }
#endif
}

static char *slot(const Express *self, int rank, int64_t phase) {
    return self->numbers[rank] + phase % self->slots * self->slot_bytes;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static char *own_slice(const Express *self, const Call *call, int64_t slice) {
    return call->own + slice * self->slice_bytes;
}

static int64_t bytes_of(const Express *self, const Call *call, int64_t slice) {
    return least(self->slice_bytes, call->bytes - slice * self->slice_bytes);
}

/* Where in a slice of so many bytes a rank's piece begins; it ends where the next rank's does. */
static int64_t piece(const Express *self, int rank, int64_t bytes) {
    int64_t share = (bytes + self->size - 1) / self->size;
    return least(bytes, (share + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES * rank);
}

/* --- steps */

/* In which phase a slice is shown. */
static int64_t shown(const Call *call, int64_t slice) {
    return call->first + (call->passes == 1 ? slice : slice ? 2 * slice - 1 : 0);
}

/* In which phase its sums are. */
static int64_t summed(const Call *call, int64_t slice) {
    return call->first + (slice < call->slices - 1 ? 2 * slice + 2 : 2 * call->slices - 1);
}

static void show(const Express *self, const Call *call, int64_t slice) {
    char *from = own_slice(self, call, slice), *to = slot(self, self->rank, shown(call, slice));
    int64_t bytes = bytes_of(self, call, slice), begin = bytes, end = bytes;
    if (call->passes == 2) { /* nobody else reads the piece that is added up here */
        begin = piece(self, self->rank, bytes);
        end = piece(self, self->rank + 1, bytes);
    }
    memcpy(to, from, begin);
    memcpy(to + end, from + end, bytes - end);
    publish(self, shown(call, slice), call->word);
}

/* The first two ranks read their own part where the sum will stand. */
static void take(const Express *self, const Call *call, int64_t slice) {
    char *out = own_slice(self, call, slice), *parts[MOST_RANKS];
    for (int r = 0; r < self->size; r++)
        parts[r] = r == self->rank && r < 2 ? out : slot(self, r, shown(call, slice));
    reduce(self, call, out, parts, bytes_of(self, call, slice));
}

static void sum_piece(const Express *self, const Call *call, int64_t slice) {
    int64_t bytes = bytes_of(self, call, slice);
    int64_t begin = piece(self, self->rank, bytes), end = piece(self, self->rank + 1, bytes);
    char *own = own_slice(self, call, slice) + begin, *out = slot(self, self->rank, summed(call, slice)) + begin;
    char *parts[MOST_RANKS];
    for (int r = 0; r < self->size; r++)
        parts[r] = r == self->rank ? own : slot(self, r, shown(call, slice)) + begin;
    reduce(self, call, out, parts, end - begin);
    memcpy(own, out, end - begin);
    publish(self, summed(call, slice), call->word);
}

static void read_sums(const Express *self, const Call *call, int64_t slice) {
    char *out = own_slice(self, call, slice);
    int64_t bytes = bytes_of(self, call, slice);
    for (int r = 0; r < self->size; r++) {
        int64_t begin = piece(self, r, bytes), end = piece(self, r + 1, bytes);
        if (r != self->rank) memcpy(out + begin, slot(self, r, summed(call, slice)) + begin, end - begin);
    }
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int there(const Express *self, const Call *call) {
    return self->of_this_call ? arrived(self, self->wanted, call->word) : reached(self, self->wanted);
}

/* Whether all others have come to a phase, or come while it is spun, or while they are given the processor. */
static int come(Express *self, const Call *call, int64_t phase, int of_this_call) {
    self->wanted = phase;
    self->of_this_call = of_this_call;
    if (there(self, call)) return 1;
    for (int64_t end = now_ns() + self->spin_ns; now_ns() < end;) {
        for (int look = 0; look < LOOKS; look++)
            if (there(self, call)) return 1;
        if (self->yields) sched_yield();
    }
    return 0;
}

/* One step, if it can be made: the first of a turn, the second, or the third. */
static int make(Express *self, const Call *call, int64_t step) {
    int64_t turn = step / 3, slices = call->slices;
    switch (step % 3) {
    case 0:
        if (turn >= slices) return 1;
        if (!come(self, call, shown(call, turn) - self->ahead, 0)) return 0;
        show(self, call, turn);
        return 1;
    case 1:
        if (call->passes == 1 || turn < 2) return 1;
        if (!come(self, call, summed(call, turn - 2), 1)) return 0;
        read_sums(self, call, turn - 2);
        return 1;
    default:
        if (turn < 1 || turn > slices) return 1;
        if (!come(self, call, shown(call, turn - 1), 1)) return 0;
        if (call->passes == 1) {
            take(self, call, turn - 1);
            return 1;
        }
        if (!come(self, call, summed(call, turn - 1) - self->ahead, 0)) return 0;
        sum_piece(self, call, turn - 1);
        return 1;
    }
}

/* The step that could not be made; -1 after the last. */
static int64_t go_on(Express *self, const Call *call, int64_t step) {
    int64_t steps = 3 * (call->slices + call->passes);
    while (step < steps && make(self, call, step)) step++;
    return step < steps ? step : -1;
}

/* --- what Python sees */

PyDoc_STRVAR(advance_doc,
             "advance(address, bytes, code, word, first, step) -> step\n\n"
             "Make the steps from `step` on of an all-reduce of the numbers at `address`, whose first phase is `first`,\n"
             "until one cannot be made, not even after a moment: which one that is; -1 where all are made.");

static PyObject *advance(Express *self, PyObject *const *args, Py_ssize_t count) {
    int64_t values[6];
    if (count != 6) return PyErr_Format(PyExc_TypeError, "advance takes 6 numbers, not %zd", count);
    for (int i = 0; i < 6; i++) {
        values[i] = PyLong_AsLongLong(args[i]);
        if (values[i] == -1 && PyErr_Occurred()) return NULL;
    }
    int64_t bytes = values[1], code = values[2], step = values[5];
    if (bytes < 0 || (bytes && !values[0]) || code < 0 || code >= CODES || step < 0)
        return PyErr_Format(PyExc_ValueError, "no all-reduce has %lld bytes at %lld, code %lld and a step %lld",
                            (long long)bytes, (long long)values[0], (long long)code, (long long)step);
    int64_t slices = bytes ? (bytes + self->slice_bytes - 1) / self->slice_bytes : 1;
    Call call = {.own = (char *)(intptr_t)values[0], .bytes = bytes, .code = (int)code, .word = values[3],
                 .first = values[4], .slices = slices, .passes = bytes > self->one_pass_bytes ? 2 : 1};
    if (bytes <= HELD_BYTES) return PyLong_FromLongLong(go_on(self, &call, step));
    Py_BEGIN_ALLOW_THREADS
    step = go_on(self, &call, step);
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(step);
}

static int addresses(PyObject *list, int size, void **found) {
    for (int r = 0; r < size; r++) {
        PyObject *item = PySequence_GetItem(list, r);
        found[r] = item ? PyLong_AsVoidPtr(item) : NULL;
        Py_XDECREF(item);
        if (PyErr_Occurred()) return -1;
    }
    return 0;
}

static int init(Express *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"rank",  "words",      "numbers", "phase_at",    "sleeps_at",      "ring_at", "ring",
                            "slots", "slot_bytes", "ahead",   "slice_bytes", "one_pass_bytes", "spin_ns", "yields", NULL};
    PyObject *words, *numbers;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iOOLLLLLLLLLLi", names, &self->rank, &words, &numbers,
                                     &self->phase_at, &self->sleeps_at, &self->ring_at, &self->ring, &self->slots,
                                     &self->slot_bytes, &self->ahead, &self->slice_bytes, &self->one_pass_bytes,
                                     &self->spin_ns, &self->yields))
        return -1;
    Py_ssize_t size = PySequence_Size(words);
    if (size < 2 || size > MOST_RANKS || PySequence_Size(numbers) != size || self->rank < 0 || self->rank >= size ||
        self->slice_bytes < LINE_BYTES || self->slice_bytes % LINE_BYTES || self->slice_bytes > self->slot_bytes) {
        PyErr_Format(PyExc_ValueError, "2 to %d ranks meet here, with slices of whole cache lines that fit a slot",
                     MOST_RANKS);
        return -1;
    }
    self->size = (int)size;
    if (addresses(words, self->size, (void **)self->words)) return -1;
    return addresses(numbers, self->size, (void **)self->numbers);
}

static PyMethodDef methods[] = {{"advance", (PyCFunction)(void (*)(void))advance, METH_FASTCALL, advance_doc}, {NULL}};

static PyMemberDef members[] = {
    {"wanted", T_LONGLONG, offsetof(Express, wanted), READONLY, "the phase that the step which could not be made needs"},
    {"of_this_call", T_INT, offsetof(Express, of_this_call), READONLY, "whether all must be in this call there"},
    {NULL},
};

static PyTypeObject type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shoal.shm_backend._native.Express",
    .tp_doc = "One rank's end of the all-reduces of a group. The memory must outlive it.",
    .tp_basicsize = sizeof(Express),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = methods,
    .tp_members = members,
    .tp_init = (initproc)init,
    .tp_new = PyType_GenericNew,
};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_native", .m_size = -1};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *made = PyModule_Create(&module);
    if (made && (PyModule_AddType(made, &type) < 0 || PyModule_AddIntConstant(made, "VERSION", VERSION) < 0)) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
