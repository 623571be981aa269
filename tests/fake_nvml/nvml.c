/* A stand-in for NVIDIA's libnvidia-ml.so.1 that plays a scenario.
 *
 * FAKE_NVML names a JSON file; it is read again whenever it changes, so a machine can fall ill while it is watched.
 *
 *   {"driver": "570.86.15", "cuda": 12080, "nvml": "12.570.86.15",
 *    "errors": {"nvmlInitWithFlags": 18}, "hang": ["nvmlInitWithFlags"], "delay_ms": {"nvmlDeviceGetName": 500},
 *    "defaults": {field: value}, "devices": [{field: value, "errors": {...}, "hang": [...]}, ...]}
 *
 * A device's fields, each with a healthy default (see `tests/fake_nvml/__init__.py` for all of them): a call first
 * hangs if told so, then waits, then returns its error (the device's, the defaults', the scenario's, in this order;
 * "*" is any call), then its value. An error is a code, or {"code": 999, "times": 1} that many times in each process.
 * Structures and names are those of NVIDIA's nvml.h.
 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int ret_t;
typedef struct node {
    char *key, *text; /* text: of a string or number */
    int kind;         /* '{' '[' '"' '0' 't' 'f' 'n' */
    int played;       /* how often an error with "times" was returned; a changed scenario begins anew */
    struct node *child, *next;
} node;

typedef struct { int index; } device;

#define OK 0
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define INSUFFICIENT_SIZE 7
#define DRIVER_NOT_LOADED 9
#define TIMEOUT 10
#define MOST 64

static node *scenario;
static struct timespec stamp;
static device handles[MOST];

/* --- JSON */

static const char *skip(const char *p) {
    while (*p && (isspace((unsigned char)*p) || *p == ',' || *p == ':')) p++;
    return p;
}

static const char *quoted(const char *p, char **out) {
    size_t used = 0, room = strlen(p) + 1;
    char *buffer = malloc(room);
    for (p++; *p && *p != '"'; p++) {
        if (*p == '\\' && p[1]) p++;
        buffer[used++] = *p;
    }
    buffer[used] = 0;
    *out = buffer;
    return *p ? p + 1 : p;
}

static const char *value(const char *p, node **out) {
    node *n = calloc(1, sizeof *n), **tail = &n->child;
    p = skip(p);
    n->kind = *p;
    *out = n;
    if (*p == '{' || *p == '[') {
        char close = *p == '{' ? '}' : ']';
        for (p = skip(p + 1); *p && *p != close; p = skip(p)) {
            char *key = NULL;
            if (close == '}') p = quoted(p, &key);
            p = value(p, tail);
            (*tail)->key = key;
            tail = &(*tail)->next;
        }
        return *p ? p + 1 : p;
    }
    if (*p == '"') return quoted(p, &n->text);
    const char *end = p;
    while (*end && !strchr(",]} \n\t", *end)) end++;
    if (!strchr("tfn", n->kind)) n->kind = '0';
    n->text = strndup(p, end - p);
    return end;
}

static node *get(node *n, const char *key) {
    for (node *c = n ? n->child : NULL; c; c = c->next)
        if (c->key && !strcmp(c->key, key)) return c;
    return NULL;
}

static node *at(node *n, int index) {
    node *c = n ? n->child : NULL;
    while (c && index-- > 0) c = c->next;
    return c;
}

static double number(node *n, double otherwise) {
    if (!n) return otherwise;
    if (n->kind == 't') return 1;
    return n->kind == '0' ? strtod(n->text, NULL) : n->kind == 'f' ? 0 : otherwise;
}

static void load(void) {
    const char *path = getenv("FAKE_NVML");
    struct stat st;
    if (!path || stat(path, &st)) return;
    if (scenario && st.st_mtim.tv_sec == stamp.tv_sec && st.st_mtim.tv_nsec == stamp.tv_nsec) return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    char *text = calloc(1, st.st_size + 1);
    size_t got = fread(text, 1, st.st_size, file);
    text[got] = 0;
    fclose(file);
    value(text, &scenario); /* the former one is leaked: a reader may still hold it */
    free(text);
    stamp = st.st_mtim;
}

/* --- what to play */

static node *own(device *d) { return d ? at(get(scenario, "devices"), d->index) : NULL; }

static node *field(device *d, const char *name) {
    node *found = get(own(d), name);
    return found ? found : get(get(scenario, "defaults"), name);
}

static double num(device *d, const char *name, double otherwise) { return number(field(d, name), otherwise); }

static const char *text(device *d, const char *name, const char *otherwise) {
    node *n = field(d, name);
    return n && n->text && n->kind != 'n' ? n->text : otherwise;
}

static int listed(node *list, const char *name) {
    for (node *c = list ? list->child : NULL; c; c = c->next)
        if (c->text && (!strcmp(c->text, name) || !strcmp(c->text, "*"))) return 1;
    return 0;
}

static int error_in(node *place, const char *name) {
    node *errors = get(place, "errors"), *found = get(errors, name);
    if (!found) found = get(errors, "*");
    if (!found || found->kind != '{') return (int)number(found, 0);
    return found->played++ < (int)number(get(found, "times"), 1) ? (int)number(get(found, "code"), 999) : 0;
}

/* Play hang, delay and error of a call; 0 means that it goes on. */
static ret_t play(device *d, const char *name) {
    load();
    if (!scenario) return DRIVER_NOT_LOADED;
    if (listed(get(scenario, "hang"), name) || listed(get(own(d), "hang"), name))
        for (;;) pause();
    double delay = number(get(get(scenario, "delay_ms"), name), 0);
    if (delay > 0) usleep((useconds_t)(delay * 1000));
    int code = error_in(own(d), name);
    if (!code) code = error_in(get(scenario, "defaults"), name);
    return code ? code : error_in(scenario, name);
}

static int count(void) {
    int n = 0;
    for (node *c = get(scenario, "devices") ? get(scenario, "devices")->child : NULL; c; c = c->next) n++;
    return n < MOST ? n : MOST;
}

#define PLAY(d) do { ret_t r_ = play(d, __func__); if (r_) return r_; } while (0)

/* A field of null is one that this card does not have. */
#define PLAY_FIELD(d, name) \
    do { PLAY(d); node *f_ = field(d, name); if (f_ && f_->kind == 'n') return NOT_SUPPORTED; } while (0)

static ret_t put(char *out, unsigned size, const char *what) {
    if (strlen(what) + 1 > size) return INSUFFICIENT_SIZE;
    strcpy(out, what);
    return OK;
}

/* --- the system */

ret_t nvmlInitWithFlags(unsigned flags) { (void)flags; PLAY(NULL); return OK; }
ret_t nvmlInit_v2(void) { PLAY(NULL); return OK; }
ret_t nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(ret_t code) { (void)code; return "played by the fake library"; }

ret_t nvmlSystemGetDriverVersion(char *out, unsigned size) {
    PLAY(NULL);
    node *n = get(scenario, "driver");
    return put(out, size, n ? n->text : "570.86.15");
}
ret_t nvmlSystemGetNVMLVersion(char *out, unsigned size) {
    PLAY(NULL);
    node *n = get(scenario, "nvml");
    return put(out, size, n ? n->text : "12.570.86.15");
}
ret_t nvmlSystemGetCudaDriverVersion_v2(int *out) { PLAY(NULL); *out = (int)number(get(scenario, "cuda"), 12080); return OK; }
ret_t nvmlDeviceGetCount_v2(unsigned *out) {
    PLAY(NULL);
    node *n = get(scenario, "count");
    *out = n ? (unsigned)number(n, 0) : (unsigned)count();
    return OK;
}
ret_t nvmlDeviceGetHandleByIndex_v2(unsigned index, device **out) {
    load();
    if (index >= (unsigned)count()) return INVALID_ARGUMENT;
    handles[index].index = (int)index;
    PLAY(&handles[index]);
    *out = &handles[index];
    return OK;
}

/* --- texts */

#define TEXT(function, name, otherwise)                                   \
    ret_t function(device *d, char *out, unsigned size) {                 \
        PLAY_FIELD(d, name);                                              \
        return put(out, size, text(d, name, otherwise));                  \
    }
static const char *made(const char *format, int index) {
    static char text[96];
    snprintf(text, sizeof text, format, index);
    return text;
}
TEXT(nvmlDeviceGetUUID, "uuid", made("GPU-00000000-0000-0000-0000-%012d", d->index))
TEXT(nvmlDeviceGetSerial, "serial", made("1650000%04d", d->index))
TEXT(nvmlDeviceGetName, "name", "NVIDIA H100 80GB HBM3")
TEXT(nvmlDeviceGetVbiosVersion, "vbios", "96.00.61.00.01")

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} pci_info;

ret_t nvmlDeviceGetPciInfo_v3(device *d, pci_info *out) {
    PLAY_FIELD(d, "pci");
    memset(out, 0, sizeof *out);
    char made[32];
    snprintf(made, sizeof made, "00000000:%02X:00.0", 0x10 + d->index);
    const char *pci = text(d, "pci", made);
    out->subsystem = (unsigned)num(d, "subsystem", 0x16c110de);
    snprintf(out->bus_id, sizeof out->bus_id, "%s", pci);
    snprintf(out->legacy, sizeof out->legacy, "%s", pci + (strlen(pci) > 12 ? strlen(pci) - 12 : 0));
    sscanf(pci, "%x:%x:%x", &out->domain, &out->bus, &out->device);
    return OK;
}

/* --- single numbers */

#define NUMBER(function, name, otherwise) \
    ret_t function(device *d, unsigned *out) { PLAY_FIELD(d, name); *out = (unsigned)num(d, name, otherwise); return OK; }
NUMBER(nvmlDeviceGetMinorNumber, "minor", d->index)
NUMBER(nvmlDeviceGetPowerUsage, "power_mw", 70000)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw", 700000)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, "power_default_mw", 700000)
NUMBER(nvmlDeviceGetPerformanceState, "pstate", 0)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width", 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "pcie_width_max", 16)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_gen", 1)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_gen_max", 5)
NUMBER(nvmlDeviceGetPersistenceMode, "persistence", 1)
NUMBER(nvmlDeviceGetComputeMode, "compute_mode", 0)

ret_t nvmlDeviceGetDefaultEccMode(device *d, unsigned *out) {
    PLAY_FIELD(d, "ecc_default");
    *out = (unsigned)num(d, "ecc_default", 1);
    return OK;
}
typedef struct { unsigned version; int margin; } margin_temperature;
ret_t nvmlDeviceGetMarginTemperature(device *d, margin_temperature *out) {
    PLAY_FIELD(d, "margin");
    out->margin = (int)num(d, "margin", 90 - num(d, "temp", 32));
    return OK;
}

ret_t nvmlDeviceGetRetiredPagesPendingStatus(device *d, unsigned *out) {
    PLAY(d);
    if (!field(d, "retired_pending")) return NOT_SUPPORTED;
    *out = (unsigned)num(d, "retired_pending", 0);
    return OK;
}
ret_t nvmlDeviceValidateInforom(device *d) { PLAY(d); return OK; }

ret_t nvmlDeviceGetTemperature(device *d, unsigned sensor, unsigned *out) {
    (void)sensor;
    PLAY_FIELD(d, "temp");
    *out = (unsigned)num(d, "temp", 32);
    return OK;
}
ret_t nvmlDeviceGetTemperatureThreshold(device *d, unsigned which, unsigned *out) {
    static const char *names[] = {"temp_shutdown", "temp_slowdown", "mem_temp_max", "temp_max"};
    static const unsigned usual[] = {92, 87, 95, 90};
    if (which > 3) return INVALID_ARGUMENT;
    PLAY_FIELD(d, names[which]);
    *out = (unsigned)num(d, names[which], usual[which]);
    return OK;
}
ret_t nvmlDeviceGetClockInfo(device *d, unsigned which, unsigned *out) {
    (void)which;
    PLAY_FIELD(d, "sm_clock");
    *out = (unsigned)num(d, "sm_clock", 345);
    return OK;
}
ret_t nvmlDeviceGetMaxClockInfo(device *d, unsigned which, unsigned *out) {
    (void)which;
    PLAY_FIELD(d, "sm_clock_max");
    *out = (unsigned)num(d, "sm_clock_max", 1980);
    return OK;
}

static ret_t reasons(device *d, unsigned long long *out) { *out = (unsigned long long)num(d, "throttle", 1); return OK; }
ret_t nvmlDeviceGetCurrentClocksEventReasons(device *d, unsigned long long *out) { PLAY_FIELD(d, "throttle"); return reasons(d, out); }
ret_t nvmlDeviceGetCurrentClocksThrottleReasons(device *d, unsigned long long *out) { PLAY_FIELD(d, "throttle"); return reasons(d, out); }

ret_t nvmlDeviceGetTotalEccErrors(device *d, unsigned type, unsigned counter, unsigned long long *out) {
    static const char *names[2][2] = {{"ecc_cor", "ecc_cor_aggregate"}, {"ecc_unc", "ecc_unc_aggregate"}};
    const char *name = names[type & 1][counter & 1];
    PLAY_FIELD(d, name);
    *out = (unsigned long long)num(d, name, 0);
    return OK;
}

/* --- pairs and lists of numbers */

static unsigned element(device *d, const char *name, int index, unsigned otherwise) {
    return (unsigned)number(at(field(d, name), index), otherwise);
}

ret_t nvmlDeviceGetEccMode(device *d, unsigned *now, unsigned *pending) {
    PLAY_FIELD(d, "ecc_mode");
    *now = element(d, "ecc_mode", 0, 1);
    *pending = element(d, "ecc_mode", 1, 1);
    return OK;
}
ret_t nvmlDeviceGetMigMode(device *d, unsigned *now, unsigned *pending) {
    PLAY_FIELD(d, "mig");
    *now = element(d, "mig", 0, 0);
    *pending = element(d, "mig", 1, 0);
    return OK;
}
ret_t nvmlDeviceGetRemappedRows(device *d, unsigned *cor, unsigned *unc, unsigned *pending, unsigned *failure) {
    PLAY_FIELD(d, "remapped");
    *cor = element(d, "remapped", 0, 0);
    *unc = element(d, "remapped", 1, 0);
    *pending = element(d, "remapped", 2, 0);
    *failure = element(d, "remapped", 3, 0);
    return OK;
}
typedef struct { unsigned max, high, partial, low, none; } row_banks;
ret_t nvmlDeviceGetRowRemapperHistogram(device *d, row_banks *out) {
    PLAY_FIELD(d, "rows");
    out->max = element(d, "rows", 0, 2560);
    out->high = element(d, "rows", 1, 0);
    out->partial = element(d, "rows", 2, 0);
    out->low = element(d, "rows", 3, 0);
    out->none = element(d, "rows", 4, 0);
    return OK;
}
ret_t nvmlDeviceGetCudaComputeCapability(device *d, int *major, int *minor) {
    PLAY_FIELD(d, "capability");
    *major = (int)element(d, "capability", 0, 9);
    *minor = (int)element(d, "capability", 1, 0);
    return OK;
}
typedef struct { unsigned version, channel, tpc; } repair_status;
ret_t nvmlDeviceGetRepairStatus(device *d, repair_status *out) {
    PLAY_FIELD(d, "repair");
    out->channel = element(d, "repair", 0, 0);
    out->tpc = element(d, "repair", 1, 0);
    return OK;
}
ret_t nvmlDeviceGetNvLinkState(device *d, unsigned link, unsigned *out) {
    PLAY_FIELD(d, "nvlinks");
    node *list = field(d, "nvlinks");
    if (!list) {
        if (link >= 18) return INVALID_ARGUMENT;
        *out = 1;
        return OK;
    }
    node *state = at(list, (int)link);
    if (!state) return INVALID_ARGUMENT;
    if (state->kind == 'n') return NOT_SUPPORTED; /* a hole: others come after it */
    *out = (unsigned)number(state, 0);
    return OK;
}
/* "p2p": {"1": status over NVLink and for reading, "2": [over NVLink, for reading], "*": of all others} */
ret_t nvmlDeviceGetP2PStatus(device *one, device *other, unsigned which, unsigned *out) {
    PLAY(one);
    char index[16];
    snprintf(index, sizeof index, "%d", other->index);
    node *pairs = field(one, "p2p"), *status = get(pairs, index);
    if (!status) status = get(pairs, "*");
    if (status && status->kind == '[') status = at(status, which == 2 ? 0 : 1);
    *out = (unsigned)number(status, 0);
    return OK;
}

/* --- structures */

typedef struct {
    unsigned version;
    unsigned long long agg_parity, agg_secded, agg_cor, vol_parity, vol_secded, vol_cor, l2, sm, pcie, mcu, other;
    unsigned exceeded;
} sram_status;
ret_t nvmlDeviceGetSramEccErrorStatus(device *d, sram_status *out) {
    PLAY_FIELD(d, "sram_unc");
    unsigned version = out->version;
    memset(out, 0, sizeof *out);
    out->version = version;
    out->agg_secded = (unsigned long long)num(d, "sram_unc", 0);
    out->exceeded = (unsigned)num(d, "sram_threshold", 0);
    return OK;
}

typedef struct {
    unsigned version;
    unsigned char cluster[16];
    unsigned status, clique;
    unsigned state;
    unsigned mask;
    unsigned char summary;
} fabric_info;
ret_t nvmlDeviceGetGpuFabricInfoV(device *d, fabric_info *out) {
    PLAY_FIELD(d, "fabric");
    node *f = field(d, "fabric");
    out->status = (unsigned)number(get(f, "status"), 0);
    out->state = (unsigned)number(get(f, "state"), 3);
    out->clique = (unsigned)number(get(f, "clique"), 0);
    memset(out->cluster, (int)number(get(f, "cluster"), 0), sizeof out->cluster);
    out->mask = 0;
    if (out->version >> 24 >= 3) out->summary = (unsigned char)number(get(f, "health"), 1);
    return OK;
}

typedef struct { unsigned long long total, free, used; } memory_v1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
#define GIB (1024.0 * 1024 * 1024)
ret_t nvmlDeviceGetMemoryInfo(device *d, memory_v1 *out) {
    PLAY_FIELD(d, "mem_used");
    out->total = (unsigned long long)num(d, "mem_total", 80 * GIB);
    out->used = (unsigned long long)(num(d, "mem_used", 5e6) + num(d, "mem_reserved", 6e8));
    out->free = out->total - out->used;
    return OK;
}
ret_t nvmlDeviceGetMemoryInfo_v2(device *d, memory_v2 *out) {
    PLAY_FIELD(d, "mem_used");
    out->total = (unsigned long long)num(d, "mem_total", 80 * GIB);
    out->reserved = (unsigned long long)num(d, "mem_reserved", 6e8);
    out->used = (unsigned long long)num(d, "mem_used", 5e6);
    out->free = out->total - out->reserved - out->used;
    return OK;
}

typedef struct { unsigned gpu, memory; } utilization;
ret_t nvmlDeviceGetUtilizationRates(device *d, utilization *out) {
    PLAY_FIELD(d, "util");
    out->gpu = (unsigned)num(d, "util", 0);
    out->memory = (unsigned)num(d, "mem_util", 0);
    return OK;
}

typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process;
static ret_t processes(device *d, const char *name, unsigned *size, process *out) {
    node *list = field(d, name);
    unsigned n = 0;
    for (node *c = list ? list->child : NULL; c; c = c->next, n++)
        if (out && n < *size) {
            memset(&out[n], 0, sizeof out[n]);
            out[n].pid = (unsigned)number(get(c, "pid"), 0);
            out[n].used = (unsigned long long)number(get(c, "used"), 0);
        }
    unsigned room = *size;
    *size = n;
    return n > room ? INSUFFICIENT_SIZE : OK;
}
#define PROCESSES(function, name) \
    ret_t function(device *d, unsigned *size, process *out) { PLAY_FIELD(d, name); return processes(d, name, size, out); }
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, "compute_procs")
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps_procs")
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics_procs")

typedef struct {
    unsigned id, scope;
    long long timestamp, latency;
    unsigned type;
    ret_t code;
    union { double d; unsigned u; unsigned long long l; } v;
} field_value;
static int usual_field(unsigned id, int *out) {
    static const int usual[][2] = {{230, 0}, {82, 40}, {193, -8}, {194, -2}, {195, 0}, {196, 0}};
    for (unsigned i = 0; i < sizeof usual / sizeof *usual; i++)
        if ((unsigned)usual[i][0] == id) return *out = usual[i][1], 1;
    return 0;
}
/* "fields": {"230": 0, "82": 40}; a field of null is not supported; {"error": N} is that error, as 2 from a driver that
 * is older than the field. */
ret_t nvmlDeviceGetFieldValues(device *d, int n, field_value *values) {
    PLAY(d);
    for (int i = 0; i < n; i++) {
        char id[16];
        int usual = 0;
        snprintf(id, sizeof id, "%u", values[i].id);
        node *f = get(get(own(d), "fields"), id);
        if (!f) f = get(get(get(scenario, "defaults"), "fields"), id);
        values[i].type = 1;
        values[i].code = OK;
        values[i].v.l = 0;
        if (!f && usual_field(values[i].id, &usual)) values[i].v.u = (unsigned)usual;
        else if (!f || f->kind == 'n') values[i].code = NOT_SUPPORTED;
        else if (f->kind == '{') values[i].code = (ret_t)number(get(f, "error"), 999);
        else values[i].v.u = (unsigned)(int)number(f, 0);
    }
    return OK;
}

/* --- events: "events": [{"device": 5, "type": 8, "data": 79}], told once for every set */

typedef struct { int told; } event_set;
typedef struct { device *d; unsigned long long type, data; unsigned gi, ci; } event_data;
ret_t nvmlEventSetCreate(event_set **out) { PLAY(NULL); *out = calloc(1, sizeof **out); return OK; }
ret_t nvmlEventSetFree(event_set *set) { free(set); return OK; }
ret_t nvmlDeviceRegisterEvents(device *d, unsigned long long types, event_set *set) { (void)types; (void)set; PLAY(d); return OK; }
ret_t nvmlDeviceGetSupportedEventTypes(device *d, unsigned long long *out) { PLAY(d); *out = 8 | 1 | 2; return OK; }
ret_t nvmlEventSetWait_v2(event_set *set, event_data *out, unsigned timeout_ms) {
    PLAY(NULL);
    for (unsigned waited = 0;; waited += 10) {
        load();
        node *event = at(get(scenario, "events"), set->told);
        if (event) {
            set->told++;
            int index = (int)number(get(event, "device"), 0);
            if (index < 0 || index >= MOST) return INVALID_ARGUMENT;
            memset(out, 0, sizeof *out);
            handles[index].index = index;
            out->d = &handles[index];
            out->type = (unsigned long long)number(get(event, "type"), 8);
            out->data = (unsigned long long)number(get(event, "data"), 0);
            return OK;
        }
        if (waited >= timeout_ms) return TIMEOUT;
        usleep(10000);
    }
}
