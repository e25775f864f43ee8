/* The short way of a message's context, compiled: the current context as ids, ids as a frame, and a
 * frame as ids. Each function here is the fast case of a function in Python that has the same name
 * and is the contract; whatever is unusual is left to that one, so there is nothing here to report
 * or to configure. What it saves is not arithmetic: a message runs this code with cold caches, and
 * then each function of Python that is entered costs microseconds (benchmarks/bench_broadcast.py).
 *
 * Limited API of CPython 3.10: one abi3 binary for 3.10 and later. That has no Py_buffer, so frames
 * come and go as bytes, whose bounds Python keeps; all reads and writes of raw memory are in
 * write_frame() and is_frame_of_ids(). What the functions keep is in the module's state, so that they
 * belong to the module and pickle by name, as a function of Python does.
 */
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

/* The layout of lens_core.frame, little-endian. */
enum {
    CRC_AT = 8,
    IDS_AT = 12,
    TRACE_AT = 20,
    SPAN_AT = 36,
    FLAGS_AT = 44,
    HEADER = 45,
    MAX_CAPACITY = HEADER + 0xFFFF
};
/* The first bytes of a frame that holds a traceparent and nothing else: version 1, no flags. */
static const unsigned char PREFIX[CRC_AT] = {'L', 'N', 'S', 'f', 1, 0, 0, 0};

/* ---- raw memory --------------------------------------------------------------------------- */

/* CRC-32 (IEEE 802.3) by half bytes: 45 bytes a message are not worth a table of 1 KB, which is
 * not in the cache when it is needed. */
static uint32_t crc32_of(uint32_t crc, const unsigned char *bytes, size_t size) {
    static const uint32_t table[16] = {
        0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4,
        0x4db26158, 0x5005713c, 0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
        0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
    };
    crc = ~crc;
    while (size--) {
        crc ^= *bytes++;
        crc = table[crc & 15] ^ (crc >> 4);
        crc = table[crc & 15] ^ (crc >> 4);
    }
    return ~crc;
}

static uint32_t frame_crc(const unsigned char *frame) {
    return crc32_of(crc32_of(0, PREFIX, CRC_AT), frame + IDS_AT, HEADER - IDS_AT);
}

static void put_little(unsigned char *to, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) to[i] = (unsigned char)(value >> (8 * i));
}

static uint64_t get_little(const unsigned char *from, int bytes) {
    uint64_t value = 0;
    while (bytes--) value = value << 8 | from[bytes];
    return value;
}

static void put_big(unsigned char *to, uint64_t value) {
    for (int i = 7; i >= 0; i--, value >>= 8) to[i] = (unsigned char)value;
}

static int is_zero(const unsigned char *bytes, size_t size) {
    return size == 0 || (bytes[0] == 0 && memcmp(bytes, bytes + 1, size - 1) == 0);
}

/* `capacity` bytes, at least HEADER. */
static void write_frame(unsigned char *frame, size_t capacity, uint64_t sequence,
                        const char *trace_id, const char *span_id, unsigned char flags) {
    memcpy(frame, PREFIX, CRC_AT);
    put_little(frame + IDS_AT, sequence, 8);
    memcpy(frame + TRACE_AT, trace_id, 16);
    memcpy(frame + SPAN_AT, span_id, 8);
    frame[FLAGS_AT] = flags;
    put_little(frame + CRC_AT, frame_crc(frame), 4);
    memset(frame + HEADER, 0, capacity - HEADER);
}

/* Whether these are an intact frame of a traceparent alone, padding included. */
static int is_frame_of_ids(const unsigned char *frame, size_t size) {
    return size >= HEADER && size <= MAX_CAPACITY && memcmp(frame, PREFIX, CRC_AT) == 0 &&
           get_little(frame + CRC_AT, 4) == frame_crc(frame) && !is_zero(frame + TRACE_AT, 16) &&
           !is_zero(frame + SPAN_AT, 8) && is_zero(frame + HEADER, size - HEADER);
}

/* ---- what the functions share ------------------------------------------------------------- */

/* What lens_core.native keeps for each function: a tuple that begins with these. */
enum { SLOW, CARRIER, CONTEXT, HEADERS, JUDGEMENT, IDS, SEQUENCE, SHARED }; /* slots sorted */

enum { ENCODE, DECODE, CURRENT, FUNCTIONS };

typedef struct {
    PyObject *kept[FUNCTIONS];
} State;

static PyObject *kept_by(PyObject *module, int function) {
    return ((State *)PyModule_GetState(module))->kept[function];
}

#define KEPT(kept, index) PyTuple_GetItem(kept, index)

/* The contract in Python, with the arguments of this call. */
static PyObject *slow_way(PyObject *kept, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames) {
    PyObject *result = NULL, *named = NULL, *positional = PyTuple_New(nargs);
    if (positional == NULL) return NULL;
    for (Py_ssize_t i = 0; i < nargs; i++) {
        Py_INCREF(args[i]);
        if (PyTuple_SetItem(positional, i, args[i]) < 0) goto done;
    }
    if (kwnames != NULL) {
        if ((named = PyDict_New()) == NULL) goto done;
        for (Py_ssize_t i = 0; i < PyTuple_Size(kwnames); i++)
            if (PyDict_SetItem(named, PyTuple_GetItem(kwnames, i), args[nargs + i]) < 0) goto done;
    }
    result = PyObject_Call(KEPT(kept, SLOW), positional, named);
done:
    Py_DECREF(positional);
    Py_XDECREF(named);
    return result;
}

/* A failure of the fast case is no failure: the slow way meets it again and judges it. What is no
 * Exception (KeyboardInterrupt) goes on. */
static int is_for_the_slow_way(void) {
    if (!PyErr_Occurred()) return 1;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return 0;
    PyErr_Clear();
    return 1;
}

/* The keyword argument of this name, borrowed; NULL if there is none. Adds to `found`. */
static PyObject *keyword(PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                         const char *name, Py_ssize_t *found) {
    Py_ssize_t count = kwnames == NULL ? 0 : PyTuple_Size(kwnames);
    for (Py_ssize_t i = 0; i < count; i++)
        if (PyUnicode_CompareWithASCIIString(PyTuple_GetItem(kwnames, i), name) == 0) {
            ++*found;
            return args[nargs + i];
        }
    return NULL;
}

/* Carrier.of_ids(ids, sequence); takes over the reference to `ids`. */
static PyObject *carrier_of_ids(PyObject *kept, PyObject *ids, PyObject *sequence) {
    PyTypeObject *type = (PyTypeObject *)KEPT(kept, CARRIER);
    PyObject *carrier = ids == NULL ? NULL : PyType_GenericAlloc(type, 0);
    if (carrier != NULL && (PyObject_SetAttr(carrier, KEPT(kept, IDS), ids) < 0 ||
                            PyObject_SetAttr(carrier, KEPT(kept, SEQUENCE), sequence) < 0 ||
                            PyObject_SetAttr(carrier, KEPT(kept, HEADERS), Py_None) < 0 ||
                            PyObject_SetAttr(carrier, KEPT(kept, CONTEXT), Py_None) < 0 ||
                            PyObject_SetAttr(carrier, KEPT(kept, JUDGEMENT), Py_None) < 0))
        Py_CLEAR(carrier);
    Py_XDECREF(ids);
    return carrier;
}

static PyObject *ids_of(const unsigned char *trace_id, const unsigned char *span_id,
                        PyObject *flags) {
    PyObject *ids = PyTuple_New(3);
    PyObject *trace = PyBytes_FromStringAndSize((const char *)trace_id, 16);
    PyObject *span = PyBytes_FromStringAndSize((const char *)span_id, 8);
    if (ids == NULL || trace == NULL || span == NULL) {
        Py_XDECREF(ids);
        Py_XDECREF(trace);
        Py_XDECREF(span);
        return NULL;
    }
    Py_INCREF(flags);
    PyTuple_SetItem(ids, 0, trace);
    PyTuple_SetItem(ids, 1, span);
    PyTuple_SetItem(ids, 2, flags);
    return ids;
}

/* ---- encode_frame(carrier, *, capacity, sequence=None) -> bytes ---------------------------- */

static PyObject *encode_fast(PyObject *kept, PyObject *carrier, PyObject *capacity,
                             PyObject *sequence) {
    PyObject *own = NULL, *result = NULL;
    PyObject *ids = PyObject_GetAttr(carrier, KEPT(kept, IDS));
    if (ids == NULL || !PyTuple_CheckExact(ids) || PyTuple_Size(ids) != 3) goto done;
    PyObject *trace_id = PyTuple_GetItem(ids, 0), *span_id = PyTuple_GetItem(ids, 1);
    if (!PyBytes_CheckExact(trace_id) || PyBytes_Size(trace_id) != 16 ||
        !PyBytes_CheckExact(span_id) || PyBytes_Size(span_id) != 8 ||
        !PyLong_Check(PyTuple_GetItem(ids, 2)))
        goto done;
    long flags = PyLong_AsLong(PyTuple_GetItem(ids, 2));
    Py_ssize_t size = PyLong_AsSsize_t(capacity);
    if (PyErr_Occurred() || flags < 0 || flags > 255 || size < HEADER || size > MAX_CAPACITY)
        goto done;
    if (sequence == NULL || sequence == Py_None) {
        sequence = own = PyObject_GetAttr(carrier, KEPT(kept, SEQUENCE));
        if (own == NULL) goto done;
    }
    uint64_t number = 0;
    if (sequence != Py_None) {
        if (!PyLong_Check(sequence)) goto done;
        number = PyLong_AsUnsignedLongLongMask(sequence);
        if (PyErr_Occurred()) goto done;
    }
    result = PyBytes_FromStringAndSize(NULL, size);
    if (result != NULL)
        write_frame((unsigned char *)PyBytes_AsString(result), (size_t)size, number,
                    PyBytes_AsString(trace_id), PyBytes_AsString(span_id), (unsigned char)flags);
done:
    Py_XDECREF(own);
    Py_XDECREF(ids);
    return result;
}

static PyObject *encode_frame(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames) {
    PyObject *kept = kept_by(module, ENCODE);
    Py_ssize_t found = 0;
    PyObject *capacity = keyword(args, nargs, kwnames, "capacity", &found);
    PyObject *sequence = keyword(args, nargs, kwnames, "sequence", &found);
    if (nargs == 1 && capacity != NULL && PyLong_Check(capacity) && kwnames != NULL &&
        found == PyTuple_Size(kwnames) &&
        (PyObject *)Py_TYPE(args[0]) == KEPT(kept, CARRIER)) {
        PyObject *frame = encode_fast(kept, args[0], capacity, sequence);
        if (frame != NULL || !is_for_the_slow_way()) return frame;
    }
    return slow_way(kept, args, nargs, kwnames);
}

/* ---- decode_frame(data) -> Carrier ---------------------------------------------------------- */

static PyObject *decode_fast(PyObject *kept, PyObject *data) {
    PyObject *copy = NULL, *carrier = NULL;
    if (!PyBytes_CheckExact(data)) {
        /* len() of a view may count items of many bytes; that many more are copied in vain. */
        if (Py_TYPE(data) != &PyMemoryView_Type || PyObject_Size(data) > MAX_CAPACITY) return NULL;
        if ((data = copy = PyBytes_FromObject(data)) == NULL) return NULL;
    }
    const unsigned char *frame = (const unsigned char *)PyBytes_AsString(data);
    if (is_frame_of_ids(frame, (size_t)PyBytes_Size(data))) {
        PyObject *flags = PyLong_FromLong(frame[FLAGS_AT]);
        PyObject *sequence = PyLong_FromUnsignedLongLong(get_little(frame + IDS_AT, 8));
        if (flags != NULL && sequence != NULL)
            carrier = carrier_of_ids(
                kept, ids_of(frame + TRACE_AT, frame + SPAN_AT, flags), sequence);
        Py_XDECREF(flags);
        Py_XDECREF(sequence);
    }
    Py_XDECREF(copy);
    return carrier;
}

static PyObject *decode_frame(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames) {
    PyObject *kept = kept_by(module, DECODE);
    if (nargs == 1 && kwnames == NULL) {
        PyObject *carrier = decode_fast(kept, args[0]);
        if (carrier != NULL || !is_for_the_slow_way()) return carrier;
    }
    return slow_way(kept, args, nargs, kwnames);
}

/* ---- current_carrier(context=None, *, sequence=None, needs_span=False) -> Carrier ----------- */

enum { SPAN_CONTEXT = SHARED, TRACE_STATE, GET_CURRENT, GET_TEXTMAP, PLAIN, TEXTMAP, OF_SPAN,
       SIXTY_FOUR };

/* The ids of a valid SpanContext without a tracestate; NULL, perhaps with an error, for another. */
static PyObject *ids_of_span_context(PyObject *kept, PyObject *context) {
    if ((PyObject *)Py_TYPE(context) != KEPT(kept, SPAN_CONTEXT) || !PyTuple_Check(context) ||
        PyTuple_Size(context) != 6)
        return NULL;
    PyObject *trace_id = PyTuple_GetItem(context, 0), *span_id = PyTuple_GetItem(context, 1);
    PyObject *flags = PyTuple_GetItem(context, 3);
    if (PyTuple_GetItem(context, 4) != KEPT(kept, TRACE_STATE) ||
        PyTuple_GetItem(context, 5) != Py_True || !PyLong_Check(trace_id) ||
        !PyLong_Check(span_id) || !PyLong_Check(flags))
        return NULL;
    long bits = PyLong_AsLong(flags);
    if (bits < 0 || bits > 255) return NULL;
    PyObject *upper = PyNumber_Rshift(trace_id, KEPT(kept, SIXTY_FOUR));
    if (upper == NULL) return NULL;
    unsigned char trace[16], span[8];
    put_big(trace, PyLong_AsUnsignedLongLong(upper));
    Py_DECREF(upper);
    if (PyErr_Occurred()) return NULL;
    put_big(trace + 8, PyLong_AsUnsignedLongLongMask(trace_id));
    put_big(span, PyLong_AsUnsignedLongLong(span_id));
    return PyErr_Occurred() ? NULL : ids_of(trace, span, flags);
}

static PyObject *current_fast(PyObject *kept, PyObject *context, PyObject *sequence) {
    PyObject *textmap = PyObject_CallNoArgs(KEPT(kept, GET_TEXTMAP));
    PyObject *plain = PyObject_GetAttr(KEPT(kept, PLAIN), KEPT(kept, TEXTMAP));
    int is_plain = textmap != NULL && textmap == plain;
    Py_XDECREF(textmap);
    Py_XDECREF(plain);
    if (!is_plain) return NULL;
    PyObject *current = context;
    if (context == Py_None) {
        if ((current = PyObject_CallNoArgs(KEPT(kept, GET_CURRENT))) == NULL) return NULL;
    } else {
        Py_INCREF(current);
    }
    PyObject *ids = NULL, *name, *span;
    Py_ssize_t at = 0;
    if (PyDict_Check(current) && PyDict_Size(current) == 1 &&
        PyDict_Next(current, &at, &name, &span)) {
        Py_INCREF(span); /* its property may run anything at all */
        PyObject *span_context = PyObject_GetAttr(span, KEPT(kept, OF_SPAN));
        if (span_context != NULL) ids = ids_of_span_context(kept, span_context);
        Py_XDECREF(span_context);
        Py_DECREF(span);
    }
    Py_DECREF(current);
    return ids == NULL ? NULL : carrier_of_ids(kept, ids, sequence);
}

static PyObject *current_carrier(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                                 PyObject *kwnames) {
    PyObject *kept = kept_by(module, CURRENT);
    Py_ssize_t found = 0, count = kwnames == NULL ? 0 : PyTuple_Size(kwnames);
    PyObject *context = keyword(args, nargs, kwnames, "context", &found);
    PyObject *sequence = keyword(args, nargs, kwnames, "sequence", &found);
    keyword(args, nargs, kwnames, "needs_span", &found); /* what the fast case takes has one */
    if (found == count && nargs <= 1 && (nargs == 0 || context == NULL)) {
        if (nargs == 1) context = args[0];
        PyObject *carrier = current_fast(kept, context == NULL ? Py_None : context,
                                         sequence == NULL ? Py_None : sequence);
        if (carrier != NULL || !is_for_the_slow_way()) return carrier;
    }
    return slow_way(kept, args, nargs, kwnames);
}

/* ---- watch_signal(signum, fd) -> bool, unwatch_signal(fd) ----------------------------------- */

/* Python runs a handler on its main thread, when that is between two bytecodes; a thread that is
 * stuck in C never is. The interpreter's wake-up descriptor tells at once, but there is one, and an
 * event loop takes it. So the handler that Python installed is called from one of ours, which
 * writes the number to a descriptor of ours first. A process has one disposition for a signal,
 * whatever interpreters it has, so this state is the process's. */
static struct sigaction behind; /* Python's own, as it was found first */
static int has_behind;
static volatile sig_atomic_t watching = -1; /* the descriptor */
static volatile pid_t watcher;

static void on_signal(int signum, siginfo_t *info, void *context) {
    int before = errno, fd = watching;
    unsigned char number = (unsigned char)signum;
    /* A forked child has the parent's pipe until it lets go of it. */
    if (fd >= 0 && watcher == getpid() && write(fd, &number, 1) < 0) { /* full: it is read soon */ }
    errno = before;
    if (behind.sa_flags & SA_SIGINFO)
        behind.sa_sigaction(signum, info, context);
    else if (behind.sa_handler != SIG_DFL && behind.sa_handler != SIG_IGN)
        behind.sa_handler(signum);
}

static PyObject *watch_signal(PyObject *module, PyObject *args) {
    int signum, fd;
    struct sigaction now, ours;
    if (!PyArg_ParseTuple(args, "ii", &signum, &fd)) return NULL;
    if (sigaction(signum, NULL, &now) < 0) return PyErr_SetFromErrno(PyExc_OSError);
    if (!(now.sa_flags & SA_SIGINFO) || now.sa_sigaction != on_signal) {
        /* Only ever in front of Python's own handler. One of another's C code (faulthandler with
         * chain=True) calls what was there before, which is ours: in front of it, without end. */
        if (now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN) Py_RETURN_FALSE;
        if (has_behind && now.sa_handler != behind.sa_handler) Py_RETURN_FALSE;
        behind = ours = now;
        has_behind = 1;
        ours.sa_flags |= SA_SIGINFO;
        ours.sa_sigaction = on_signal;
        if (sigaction(signum, &ours, NULL) < 0) return PyErr_SetFromErrno(PyExc_OSError);
    }
    watcher = getpid();
    watching = fd;
    Py_RETURN_TRUE;
}

static PyObject *unwatch_signal(PyObject *module, PyObject *args) {
    int fd;
    if (!PyArg_ParseTuple(args, "i", &fd)) return NULL;
    if (watching == fd) watching = -1;
    Py_RETURN_NONE;
}

/* ---- the module ----------------------------------------------------------------------------- */

#define FUNCTION(name, signature)                                                   \
    {                                                                               \
        #name, (PyCFunction)(void (*)(void))name, METH_FASTCALL | METH_KEYWORDS,    \
            #name "($module, /, " signature                                         \
                  ")\n--\n\nThe compiled fast case; lens_core.native.in_python has " \
                  "the contract."                                                   \
    }

static PyMethodDef fast[FUNCTIONS] = {
    FUNCTION(encode_frame, "carrier, *, capacity, sequence=None"),
    FUNCTION(decode_frame, "data"),
    FUNCTION(current_carrier, "context=None, *, sequence=None, needs_span=False"),
};

/* bind(name, *kept): the compiled function of this name, which from now on keeps this. */
static PyObject *bind(PyObject *module, PyObject *args) {
    static const Py_ssize_t sizes[FUNCTIONS] = {SHARED, SHARED, SIXTY_FOUR + 1};
    Py_ssize_t size = PyTuple_Size(args);
    PyObject *name = size == 0 ? Py_None : PyTuple_GetItem(args, 0);
    for (int i = 0; PyUnicode_Check(name) && i < FUNCTIONS; i++) {
        if (PyUnicode_CompareWithASCIIString(name, fast[i].ml_name) != 0) continue;
        if (size - 1 != sizes[i] || !PyType_Check(PyTuple_GetItem(args, 1 + CARRIER))) break;
        State *state = PyModule_GetState(module);
        if (state->kept[i] != NULL) break; /* a call may be under way */
        PyObject *home = PyObject_GetAttrString(PyTuple_GetItem(args, 1 + SLOW), "__module__");
        if (home == NULL) return NULL;
        if ((state->kept[i] = PyTuple_GetSlice(args, 1, size)) == NULL) {
            Py_DECREF(home);
            return NULL;
        }
        PyObject *function = PyCFunction_NewEx(&fast[i], module, home);
        Py_DECREF(home);
        return function;
    }
    PyErr_SetString(PyExc_TypeError, "bind(name, *kept) takes what lens_core.native passes, once");
    return NULL;
}

static PyMethodDef functions[] = {
    {"bind", bind, METH_VARARGS, "The compiled function of a name, with what it keeps."},
    {"watch_signal", watch_signal, METH_VARARGS,
     "Write a signal's number to a descriptor before Python's handler sees it.\n\n"
     "For one signal of the process. False where no handler of Python's is installed for it."},
    {"unwatch_signal", unwatch_signal, METH_VARARGS,
     "Never write to this descriptor any more; nothing where another is written to."},
    {NULL, NULL, 0, NULL},
};

static int traverse(PyObject *module, visitproc visit, void *arg) {
    State *state = PyModule_GetState(module);
    for (int i = 0; state != NULL && i < FUNCTIONS; i++) Py_VISIT(state->kept[i]);
    return 0;
}

static int clear(PyObject *module) {
    State *state = PyModule_GetState(module);
    for (int i = 0; state != NULL && i < FUNCTIONS; i++) Py_CLEAR(state->kept[i]);
    return 0;
}

static void release(void *module) { clear(module); }

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "lens_core._native",
    .m_doc = "The compiled short way of a message's context.",
    .m_size = sizeof(State),
    .m_methods = functions,
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = clear,
    .m_free = release,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
