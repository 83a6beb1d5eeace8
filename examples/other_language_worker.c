/* A worker in C, written from docs/protocol.md alone: no Python, no msgpack library.
 *
 *     cc -std=c11 -O2 -pthread -o parrot examples/other_language_worker.c
 *     Supervisor(engine="parrot", python="./parrot", options={"step_ms": 50})
 *
 * Its engine is a parrot: it says the prompt back, a word a token, and computes each for step_ms milliseconds. Then it
 * ends by itself (stop), or begins anew with ignore_eos. It can count the words of a prompt, and knows nothing of
 * probabilities, grammars and vectors. One slot. For Linux.
 *
 * Threads: main is the work loop and alone writes frames; control reads messages; urgent waits for SIGUSR1.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <execinfo.h>
#endif

enum { ASKED_FOR = 0, BAD_ARGUMENTS = 64, LOAD_FAILED = 69, INTERNAL_ERROR = 70, BROKEN_CONTROL = 76 };
enum { MAX_TO_WORKER = 16 << 20, MAX_DEPTH = 41, MAX_STOPS = 64, MAX_WORD_BYTES = 1 << 16, CONTEXT = 4096, EARLY = 1024 };
static const uint64_t NS_PER_MS = 1000000, BEAT_NS = 100000000;

static int control_fd = -1, frames_fd = -1, urgent_fd = -1;

static _Noreturn void leave(int code, const char *why) {
    if (why) dprintf(2, "worker: %s\n", why);
    _exit(code); /* at once: no other thread can hold it up */
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void *need(void *memory) {
    if (!memory) leave(INTERNAL_ERROR, "out of memory");
    return memory;
}

/* --- msgpack, as far as the protocol needs it: reading ------------------------------------------------------------ */

typedef struct { const uint8_t *at, *end; } Reader;
typedef struct { const char *bytes; size_t size; } Text;

static const uint8_t *bytes_of(Reader *r, uint64_t count) {
    if ((uint64_t)(r->end - r->at) < count) leave(BROKEN_CONTROL, "a frame ends in the middle of a value");
    const uint8_t *start = r->at;
    r->at += count;
    return start;
}

static uint64_t big_endian(Reader *r, int count) {
    const uint8_t *from = bytes_of(r, (uint64_t)count);
    uint64_t value = 0;
    for (int i = 0; i < count; i++) value = value << 8 | from[i];
    return value;
}

/* If the next value has this family of types, take its head and return true. count: its number, length or entries. */
static bool head(Reader *r, uint8_t fix, uint8_t mask, uint8_t first, uint8_t last, int width, uint64_t *count) {
    if (r->at == r->end) leave(BROKEN_CONTROL, "a frame ends where a value was due");
    uint8_t type = *r->at;
    if ((type & mask) == fix) { r->at++; *count = type & (uint8_t)~mask; return true; }
    if (type < first || type > last) return false;
    r->at++;
    *count = big_endian(r, width << (type - first));
    return true;
}

static bool whole(Reader *r, uint64_t *n) { return head(r, 0x00, 0x80, 0xcc, 0xcf, 1, n); }
static bool array(Reader *r, uint64_t *n) { return head(r, 0x90, 0xf0, 0xdc, 0xdd, 2, n); }
static bool map(Reader *r, uint64_t *n) { return head(r, 0x80, 0xf0, 0xde, 0xdf, 2, n); }

static bool text(Reader *r, Text *out) {
    uint64_t size;
    if (!head(r, 0xa0, 0xe0, 0xd9, 0xdb, 1, &size)) return false;
    *out = (Text){(const char *)bytes_of(r, size), size};
    return true;
}

static bool byte_is(Reader *r, uint8_t type) {
    bool is = r->at < r->end && *r->at == type;
    r->at += is;
    return is;
}

static bool nil(Reader *r) { return byte_is(r, 0xc0); }

static bool flag(Reader *r, bool *out) {
    *out = byte_is(r, 0xc3);
    return *out || byte_is(r, 0xc2);
}

static void skip(Reader *r, int depth) {
    uint64_t count;
    Text ignored;
    bool flagged, is_map;
    if (depth > MAX_DEPTH) leave(BROKEN_CONTROL, "a field is nested too deep");
    if (nil(r) || flag(r, &flagged) || whole(r, &count) || text(r, &ignored)) return;
    if ((is_map = map(r, &count)) || array(r, &count)) {
        for (uint64_t i = 0; i < count << is_map; i++) skip(r, depth + 1);
        return;
    }
    uint8_t type = *bytes_of(r, 1);
    if (type >= 0xe0) return; /* a negative number in the type itself */
    switch (type) {
    case 0xd0: bytes_of(r, 1); return; /* int 8, 16, 32, 64 */
    case 0xd1: bytes_of(r, 2); return;
    case 0xc4: bytes_of(r, big_endian(r, 1)); return; /* bin 8, 16, 32 */
    case 0xc5: bytes_of(r, big_endian(r, 2)); return;
    case 0xc6: bytes_of(r, big_endian(r, 4)); return;
    case 0xd2: case 0xca: bytes_of(r, 4); return; /* float 32 */
    case 0xd3: case 0xcb: bytes_of(r, 8); return; /* float 64 */
    }
    leave(BROKEN_CONTROL, "a value has a type that the protocol doesn't use");
}

static bool is(Text t, const char *name) { return t.size == strlen(name) && !memcmp(t.bytes, name, t.size); }

static void must(bool taken, const char *field) {
    if (taken) return;
    char why[80];
    snprintf(why, sizeof why, "control is broken: unexpected %s", field);
    leave(BROKEN_CONTROL, why);
}

/* --- msgpack: writing; a frame is built whole and written by main alone ------------------------------------------- */

static uint8_t *frame;
static size_t frame_size, frame_room;

static void put(const void *data, size_t size) {
    if (frame_size + size > frame_room) frame = need(realloc(frame, frame_room = 2 * (frame_size + size)));
    memcpy(frame + frame_size, data, size);
    frame_size += size;
}

static void put_head(uint8_t type, uint64_t value, int width) {
    uint8_t head[9] = {type};
    for (int i = 0; i < width; i++) head[1 + i] = (uint8_t)(value >> 8 * (width - 1 - i));
    put(head, 1 + (size_t)width);
}

static void put_whole(uint64_t value) { put_head(0xcf, value, 8); }
static void put_array(uint32_t entries) { put_head(0xdd, entries, 4); }
static void put_map(uint32_t entries) { put_head(0xdf, entries, 4); }
static void put_nil(void) { put_head(0xc0, 0, 0); }
static void put_flag(bool value) { put_head(value ? 0xc3 : 0xc2, 0, 0); }

static void put_bytes(const char *bytes, size_t size) {
    put_head(0xdb, size, 4);
    if (size) put(bytes, size);
}

static void put_text(const char *string) { put_bytes(string, strlen(string)); }

/* Begin a message: its name and its stamp. fields: how many follow the name, the stamp included. */
static void begin(const char *name, uint32_t fields) {
    frame_size = 4; /* the length comes last */
    if (!frame) frame = need(malloc(frame_room = 256));
    put_array(1 + fields);
    put_text(name);
    put_whole(now_ns());
}

static void send_frame(void) {
    for (int i = 0; i < 4; i++) frame[i] = (uint8_t)((frame_size - 4) >> 8 * (3 - i));
    for (size_t sent = 0; sent < frame_size;) {
        ssize_t count = write(frames_fd, frame + sent, frame_size - sent);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) leave(ASKED_FOR, NULL); /* the supervisor is gone */
        sent += (size_t)count;
    }
}

/* --- what the threads share, under one lock ------------------------------------------------------------------------ */

typedef struct {
    uint64_t id, limit, delivered, max_tokens, noticed_ns; /* max_tokens, noticed_ns: 0 is none */
    uint8_t *payload; /* the frame that the texts lie in */
    Text prompt, stops[MAX_STOPS];
    size_t stop_count;
    bool ignore_eos;
    const char *refused, *refused_field;
} Attempt;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static Attempt attempt;
static bool has_attempt, load_came, loaded, draining, stopping;
static char load_refusal[200];
static uint64_t step_ms;
typedef struct Query { struct Query *next; uint64_t id, words; const char *refused; } Query;
static Query *asked, **asked_end = &asked; /* what main has to answer */
static struct { uint64_t id, noticed_ns; } early[EARLY]; /* cancels of ids that aren't here: early, or late */
static size_t early_next;

static void cancel(uint64_t id) {
    pthread_mutex_lock(&lock);
    if (has_attempt && attempt.id == id) {
        if (!attempt.noticed_ns) attempt.noticed_ns = now_ns();
        pthread_cond_broadcast(&changed);
    } else {
        early[early_next].id = id;
        early[early_next].noticed_ns = now_ns();
        early_next = (early_next + 1) % EARLY;
    }
    pthread_mutex_unlock(&lock);
}

/* --- control: its own thread, so that a cancel takes effect while a step runs ------------------------------------- */

static void take_load(Reader *r) {
    Text engine, name;
    uint64_t options;
    must(text(r, &engine), "load.engine");
    if (!nil(r)) must(text(r, &name), "load.model");
    must(map(r, &options), "load.options");
    if (!is(engine, "parrot")) snprintf(load_refusal, sizeof load_refusal, "this worker has the engine parrot only");
    while (options--) {
        must(text(r, &name), "load.options");
        if (is(name, "step_ms") && whole(r, &step_ms)) continue;
        skip(r, 1);
        int shown = name.size < 80 ? (int)name.size : 80;
        snprintf(load_refusal, sizeof load_refusal, "the option %.*s is unknown or wrong; known is step_ms, a whole "
                 "number", shown, name.bytes);
    }
    for (int i = 0; i < 3; i++) skip(r, 0); /* snapshot_share, step_budget_s, workers: nothing to keep, read or share */
    must(!load_came, "second load");
    load_came = true;
}

static void refuse(const char *field, const char *why) {
    if (!attempt.refused) attempt.refused = why, attempt.refused_field = field;
}

static void take_limits(Reader *r) {
    uint64_t entries, stops;
    Text name;
    must(map(r, &entries), "submit.limits");
    while (entries--) {
        must(text(r, &name), "submit.limits");
        if (is(name, "max_tokens") && (nil(r) || whole(r, &attempt.max_tokens))) continue;
        if (is(name, "ignore_eos") && flag(r, &attempt.ignore_eos)) continue;
        if (is(name, "stop") && array(r, &stops)) {
            while (stops--) {
                Text stop;
                if (!text(r, &stop)) skip(r, 2), refuse("stop", "stop must hold strings");
                else if (attempt.stop_count == MAX_STOPS || !stop.size) refuse("stop", "stop: too many, or empty");
                else attempt.stops[attempt.stop_count++] = stop;
            }
            continue;
        }
        skip(r, 1);
        refuse(NULL, "a limit is unknown or wrong");
    }
}

static void take_sampling(Reader *r) {
    static const char *const known[] = {"temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty",
        "repeat_last_n", "frequency_penalty", "presence_penalty", "logit_bias"};
    uint64_t entries;
    Text name;
    must(map(r, &entries), "submit.sampling");
    while (entries--) {
        bool found = false;
        must(text(r, &name), "submit.sampling");
        for (size_t i = 0; i < sizeof known / sizeof *known; i++) found |= is(name, known[i]);
        if (!found) refuse(NULL, "a sampling option is unknown");
        skip(r, 1); /* a parrot has no choice */
    }
}

/* What is asked of the answer beside its text: only what isn't a default is told. */
static void take_output(Reader *r) {
    uint64_t entries;
    Text name, choice;
    must(map(r, &entries), "submit.output");
    while (entries--) {
        must(text(r, &name), "submit.output");
        if (is(name, "tool_choice") && text(r, &choice)) {
            if (!is(choice, "none") && !is(choice, "auto")) refuse("tool_choice", "a parrot calls nobody");
            continue;
        }
        skip(r, 1);
        if (is(name, "logprobs") || is(name, "top_logprobs")) refuse("logprobs", "a parrot is always sure");
        else if (is(name, "grammar")) refuse("grammar", "a parrot follows no grammar");
        else if (is(name, "json_schema")) refuse("json_schema", "a parrot follows no schema");
        else refuse(NULL, "an option of the output is unknown or wrong");
    }
}

/* The text of the last message: that's what a parrot hears. wrong: set if there is one that isn't text. */
static Text last_content(Reader *r, uint64_t messages, const char *field, bool *wrong) {
    uint64_t entries;
    Text name, value = {"", 0};
    while (messages--) {
        must(map(r, &entries), field);
        while (entries--) {
            must(text(r, &name), field);
            if (!is(name, "content")) skip(r, 2);
            else if (!text(r, &value)) skip(r, 2), *wrong = true;
        }
    }
    return value;
}

static void take_submit(Reader *r, uint8_t *payload) {
    uint64_t id, messages = 0, ignored;
    bool special, has_prompt, wrong = false;
    must(whole(r, &id), "submit.id");
    must(!has_attempt, "submit: the id is here already, or the slot is taken");
    attempt = (Attempt){.id = id, .payload = payload};
    if ((has_prompt = !nil(r))) must(text(r, &attempt.prompt), "submit.prompt");
    if (!nil(r)) {
        must(array(r, &messages), "submit.messages");
        if (has_prompt || !messages) refuse("prompt", "exactly one of prompt, messages and texts must be given");
        attempt.prompt = last_content(r, messages, "submit.messages", &wrong);
        if (wrong) refuse("messages", "content must be text");
        has_prompt = true;
    }
    take_sampling(r);
    must(whole(r, &ignored), "submit.seed");
    skip(r, 0); /* template_clock_s: a parrot has no template */
    must(flag(r, &special), "submit.special");
    take_limits(r);
    must(whole(r, &attempt.limit), "submit.credit");
    must(array(r, &attempt.delivered), "submit.delivered");
    for (uint64_t i = 0; i < attempt.delivered; i++) must(whole(r, &ignored), "submit.delivered");
    skip(r, 0); /* snapshot: a parrot has nothing to keep */
    if (!nil(r)) skip(r, 0), refuse("texts", "a parrot has no vectors");
    else if (!has_prompt) refuse("prompt", "exactly one of prompt, messages and texts must be given");
    take_output(r);
    skip(r, 0); /* tools: a parrot has no template that could show them */
    skip(r, 0); /* priority: there is one slot, and nothing to share */
    if (attempt.limit < attempt.delivered) attempt.limit = attempt.delivered;
    for (size_t i = 0; i < EARLY; i++)
        if (early[i].noticed_ns && early[i].id == id) attempt.noticed_ns = early[i].noticed_ns, early[i].noticed_ns = 0;
    has_attempt = true;
}

/* The words of a text, each with the white space behind it: together they are the text. Into words, or only counted. */
static uint64_t words_of(Text from, Text *words, uint64_t most) {
    uint64_t count = 0;
    for (size_t at = 0; at < from.size && count < most; count++) {
        size_t start = at;
        while (at < from.size && !strchr(" \n\t", from.bytes[at])) at++;
        while (at < from.size && strchr(" \n\t", from.bytes[at])) at++;
        if (words) words[count] = (Text){from.bytes + start, at - start};
    }
    return count;
}

/* A question about text. It is only read here: main alone writes frames. */
static void take_query(Reader *r) {
    uint64_t entries, messages;
    Text kind, name, prompt = {"", 0};
    bool wrong = false;
    Query *query = need(calloc(1, sizeof *query));
    must(whole(r, &query->id) && text(r, &kind) && map(r, &entries), "query");
    while (entries--) {
        must(text(r, &name), "query.arguments");
        if (is(name, "prompt") && text(r, &prompt)) continue;
        if (is(name, "messages") && array(r, &messages)) {
            prompt = last_content(r, messages, "query.arguments", &wrong);
            continue;
        }
        skip(r, 1);
    }
    query->words = words_of(prompt, NULL, UINT64_MAX);
    if (!is(kind, "count")) query->refused = "a parrot has no vocabulary: it can only count";
    *asked_end = query;
    asked_end = &query->next;
}

/* Returns whether the payload is kept. */
static bool take_message(uint8_t *payload, size_t size) {
    Reader reader = {payload, payload + size}, *r = &reader;
    uint64_t entries, id, limit;
    Text name;
    must(array(r, &entries) && entries && text(r, &name), "frame: no array that begins with a name");
    bool is_load = is(name, "load"), is_submit = is(name, "submit"), is_credit = is(name, "credit"),
         is_cancel = is(name, "cancel"), is_query = is(name, "query"), is_drain = is(name, "drain"),
         is_shutdown = is(name, "shutdown");
    must(is_load || is_submit || is_credit || is_cancel || is_query || is_drain || is_shutdown, "message");
    must(entries - 1 == (is_load ? 6 : is_submit ? 15 : is_query ? 3 : is_credit ? 2 : is_cancel), "number of fields");
    must(load_came || is_load || is_cancel || is_shutdown, "message before load");
    if (is_cancel) {
        must(whole(r, &id), "cancel.id");
        cancel(id);
    }
    pthread_mutex_lock(&lock);
    if (is_load) take_load(r);
    if (is_submit) take_submit(r, payload);
    if (is_query) take_query(r);
    if (is_credit) {
        must(whole(r, &id) && whole(r, &limit), "credit");
        if (has_attempt && attempt.id == id && attempt.limit < limit) attempt.limit = limit;
    }
    draining |= is_drain;
    stopping |= is_shutdown;
    if (is_shutdown && !loaded) leave(ASKED_FOR, NULL);
    must(r->at == r->end, "bytes after the array");
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return is_submit;
}

static void read_control(uint8_t *into, size_t size) {
    while (size) {
        ssize_t count = read(control_fd, into, size);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) leave(ASKED_FOR, NULL); /* the end of control is the end of the supervisor */
        into += count;
        size -= (size_t)count;
    }
}

static void *serve_control(void *unused) {
    for (;;) {
        uint8_t length[4];
        read_control(length, 4);
        size_t size = (size_t)length[0] << 24 | (size_t)length[1] << 16 | (size_t)length[2] << 8 | length[3];
        if (size > MAX_TO_WORKER) leave(BROKEN_CONTROL, "control is broken: a frame declares too much");
        uint8_t *payload = need(malloc(size + 1));
        read_control(payload, size);
        if (!take_message(payload, size)) free(payload);
    }
    return unused;
}

/* --- urgent: the second stage of a cancel -------------------------------------------------------------------------- */

static void *serve_urgent(void *unused) {
    sigset_t urgent;
    sigemptyset(&urgent);
    sigaddset(&urgent, SIGUSR1);
    for (int number;;) {
        uint8_t id[8];
        sigwait(&urgent, &number);
        /* Ids are written whole, and the pipe doesn't block: this ends when it is empty. */
        while (read(urgent_fd, id, sizeof id) == sizeof id) {
            uint64_t value = 0;
            for (int i = 0; i < 8; i++) value = value << 8 | id[i];
            cancel(value);
        }
    }
    return unused;
}

/* --- the work loop: main ------------------------------------------------------------------------------------------- */

static uint64_t steps, longest_ns, next_beat_ns;
static char held[MAX_WORD_BYTES * 2];
static size_t held_size;

static void beat(bool active) {
    uint64_t now = now_ns();
    if (now < next_beat_ns) return;
    next_beat_ns = now + BEAT_NS;
    begin("beat", 5);
    put_whole(steps);
    put_map(1), put_text("decode"), put_whole(longest_ns);
    put_whole(active), put_whole(0);
    send_frame();
}

/* Append a word to what is held back; return how much of it may be shown. Sets *stopped at a stop string. */
static size_t shown_of(Text word, bool *stopped) {
    size_t before = held_size, longest = 0;
    memcpy(held + held_size, word.bytes, word.size);
    held_size += word.size;
    for (size_t end = before + 1; end <= held_size; end++) {
        for (size_t i = 0; i < attempt.stop_count; i++) {
            Text stop = attempt.stops[i];
            if (stop.size <= end && stop.size > longest && !memcmp(held + end - stop.size, stop.bytes, stop.size))
                longest = stop.size;
        }
        if (longest) { *stopped = true; return end - longest; }
    }
    for (size_t i = 0; i < attempt.stop_count; i++) /* the longest end that could become a stop string */
        for (size_t size = attempt.stops[i].size - 1; size > longest; size--)
            if (size <= held_size && !memcmp(held + held_size - size, attempt.stops[i].bytes, size)) longest = size;
    return held_size - longest;
}

/* Wait for a change, at most until then; or answer what was asked meanwhile. With the lock held. */
static void wait_for_change(const struct timespec *until) {
    Query *query = asked;
    if (!query) {
        if (until) pthread_cond_timedwait(&changed, &lock, until);
        else pthread_cond_wait(&changed, &lock);
        return;
    }
    asked = query->next;
    if (!asked) asked_end = &asked;
    pthread_mutex_unlock(&lock);
    begin("answered", 4);
    put_whole(query->id);
    if (query->refused) {
        put_nil(), put_map(2);
        put_text("code"), put_text("invalid_request"), put_text("message"), put_text(query->refused);
    } else put_whole(query->words), put_nil();
    send_frame();
    free(query);
    pthread_mutex_lock(&lock);
}

/* Compute for step_ms, or until cancelled. With the lock held. Returns whether the step was finished. */
static bool step(void) {
    uint64_t start = now_ns(), until = start + step_ms * NS_PER_MS;
    struct timespec t = {(time_t)(until / 1000000000u), (long)(until % 1000000000u)};
    while (!attempt.noticed_ns && !stopping && now_ns() < until) wait_for_change(&t);
    if (attempt.noticed_ns || stopping) return false;
    steps++;
    if (now_ns() - start > longest_ns) longest_ns = now_ns() - start;
    return true;
}

static const char *answer(const Text *words, uint64_t count, uint64_t *index, uint64_t *computed) {
    for (;;) {
        pthread_mutex_lock(&lock);
        /* Without credit nothing is computed, not even the end. */
        while (asked || (!attempt.noticed_ns && !stopping && *index >= attempt.limit)) wait_for_change(NULL);
        bool finished = step();
        pthread_mutex_unlock(&lock);
        if (!finished) return "cancelled";
        ++*computed;
        if (!count || (*index >= count && !attempt.ignore_eos)) return "stop"; /* the end token isn't sent */
        bool stopped = false;
        Text word = words[*index % count];
        size_t shown = shown_of(word, &stopped);
        begin("tokens", 4);
        put_whole(attempt.id), put_whole(*index);
        put_array(1), put_array(3), put_whole(*index % count), put_bytes(held, shown), put_nil();
        send_frame();
        memmove(held, held + shown, held_size -= shown);
        if (stopped) held_size = 0; /* a stop string is no part of the answer */
        ++*index;
        beat(true);
        if (stopped) return "stop_sequence";
        if (attempt.max_tokens && *index >= attempt.max_tokens) return "length";
        if (count + *index >= CONTEXT) return "context_full";
    }
}

static void serve_attempt(void) {
    static Text words[CONTEXT];
    uint64_t count = words_of(attempt.prompt, words, CONTEXT), index = attempt.delivered, computed = 0;
    const char *why = "invalid_request", *code = "invalid_request";
    held_size = 0;
    if (count >= CONTEXT) refuse("prompt", "the prompt doesn't fit into the context");
    for (uint64_t i = 0; i < count; i++)
        if (words[i].size >= MAX_WORD_BYTES) refuse("prompt", "a word of the prompt is too long for a frame");
    pthread_mutex_lock(&lock);
    bool cancelled = attempt.noticed_ns != 0;
    if (draining) why = "engine_error", code = "draining", attempt.refused = "the worker is draining";
    pthread_mutex_unlock(&lock);
    if (!attempt.refused) {
        why = "cancelled";
        if (!cancelled) {
            begin("started", 5);
            put_whole(attempt.id), put_whole(0), put_whole(0), put_whole(count);
            send_frame();
            why = answer(words, count, &index, &computed);
        }
    }
    begin("ended", 6);
    put_whole(attempt.id), put_text(why);
    put_bytes(held, strcmp(why, "cancelled") ? held_size : 0); /* what was held back belongs to the answer */
    put_map(4);
    put_text("prompt_tokens"), put_whole(count), put_text("cached_tokens"), put_whole(0);
    put_text("completion_tokens"), put_whole(index), put_text("computed_tokens"), put_whole(computed);
    if (attempt.refused) {
        put_map(4);
        put_text("code"), put_text(code), put_text("message"), put_text(attempt.refused);
        put_text("detail"), put_text(""), put_text("field");
        attempt.refused_field ? put_text(attempt.refused_field) : put_nil();
    } else put_nil();
    send_frame();
    free(attempt.payload);
    /* The slot is free before anybody hears of it: the next submit may follow at once. */
    pthread_mutex_lock(&lock);
    has_attempt = false;
    uint64_t id = attempt.id, noticed_ns = attempt.noticed_ns, freed_ns = now_ns();
    pthread_mutex_unlock(&lock);
    begin("released", 4);
    put_whole(id), noticed_ns ? put_whole(noticed_ns) : put_nil(), put_whole(freed_ns);
    send_frame();
    beat(false);
}

static void load(void) {
    pthread_mutex_lock(&lock);
    while (!load_came) pthread_cond_wait(&changed, &lock);
    loaded = !*load_refusal;
    pthread_mutex_unlock(&lock);
    if (*load_refusal) {
        begin("failed", 5);
        put_text("model_load"), put_text(load_refusal), put_text(""), put_flag(true);
        send_frame();
        leave(LOAD_FAILED, load_refusal);
    }
    begin("progress", 3);
    put_text("load"), put_whole(1);
    send_frame();
    begin("ready", 3);
    put_text("parrot 1");
    put_map(5);
    put_text("engine"), put_text("parrot"), put_text("slots"), put_whole(1);
    put_text("context_tokens"), put_whole(CONTEXT), put_text("has_chat_template"), put_flag(true);
    put_text("abort"), put_text("node");
    send_frame();
}

/* --- the process ---------------------------------------------------------------------------------------------------- */

static void show_stack(int number) {
    (void)number;
#ifdef __GLIBC__
    void *frames[64];
    backtrace_symbols_fd(frames, backtrace(frames, 64), 2);
#endif
}

static void set_signals(void) {
    sigset_t urgent;
    sigemptyset(&urgent);
    sigaddset(&urgent, SIGUSR1);
    sigprocmask(SIG_SETMASK, &urgent, NULL); /* sets, not adds: an inherited mask must not keep SIGTERM out */
    signal(SIGINT, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGTERM, SIG_DFL);
#ifdef __GLIBC__
    backtrace((void *[1]){NULL}, 1); /* the first call loads a library, which a handler must not */
#endif
    sigaction(SIGUSR2, &(struct sigaction){.sa_handler = show_stack, .sa_flags = SA_RESTART}, NULL);
}

static int number_after(int count, char **arguments, const char *name) {
    for (int i = 1; i + 1 < count; i++)
        if (!strcmp(arguments[i], name)) return atoi(arguments[i + 1]);
    leave(BAD_ARGUMENTS, "a worker is started by a supervisor, not by hand");
}

int main(int count, char **arguments) {
    /* What stands before the options, -P -m infervisor.worker, is for a Python interpreter. */
    control_fd = number_after(count, arguments, "--control");
    frames_fd = number_after(count, arguments, "--frames");
    urgent_fd = number_after(count, arguments, "--urgent");
    for (int i = 0; i < 3; i++) {
        int fd = (int[]){control_fd, frames_fd, urgent_fd}[i];
        if (fd < 3 || fcntl(fd, F_SETFD, FD_CLOEXEC) < 0) leave(BAD_ARGUMENTS, "a descriptor isn't open");
    }
    set_signals();
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != number_after(count, arguments, "--parent")) leave(ASKED_FOR, "the parent is gone");

    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &monotonic);
    sigset_t all, mine;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &mine); /* so that SIGUSR2 shows the stack of the step */
    pthread_t control, urgent;
    if (pthread_create(&urgent, NULL, serve_urgent, NULL) || pthread_create(&control, NULL, serve_control, NULL))
        leave(INTERNAL_ERROR, "no thread can be started");
    pthread_sigmask(SIG_SETMASK, &mine, NULL);

    begin("hello", 4);
    put_whole(3), put_whole((uint64_t)getpid()), put_map(1), put_text("parrot"), put_text("1");
    send_frame();
    load();
    for (;;) {
        pthread_mutex_lock(&lock);
        while (asked || (!has_attempt && !stopping)) wait_for_change(NULL);
        bool serve = has_attempt;
        pthread_mutex_unlock(&lock);
        if (!serve) leave(ASKED_FOR, NULL);
        serve_attempt();
    }
}
