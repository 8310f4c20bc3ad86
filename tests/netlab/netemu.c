/* netemu: an Ethernet switch in user space, and the hosts plugged into it.
 *
 * Each host is a network namespace of its own with one TAP device, eth0. This process owns the other end of every TAP
 * and forwards frames by destination address (02:00:00:00:00:<i+1> is host i), in three steps:
 *
 *     egress     one frame after another at the sender's rate                      (its NIC)
 *     flight     `delay` later, one way                                            (cables and switch)
 *     ingress    one frame after another at the receiver's rate                    (its NIC: incast queues here)
 *
 * Cut-through: a frame's ingress overlaps its egress. Nothing is lost: while a sender's backlog exceeds `QUEUE_NS` its
 * TAP is not read, the kernel's queue fills, and TCP sees ordinary back-pressure. tc's netem would do the delay, but
 * many kernels are built without it.
 *
 * The namespaces have no names. They exist as long as this process holds them open or a process is in them, so there is
 * nothing to clean up when any of them is killed.
 *
 *     netemu HOSTS MBIT_PER_S[,MBIT_PER_S...] DELAY_US        the last rate holds for all further hosts
 *
 * Prints "ready <descriptor of the namespace of host 0> ..." (open them as /proc/<pid>/fd/<descriptor>). Then each line
 * on stdin is answered with one line, the matrix of bytes sent so far: row = sender, column = receiver. End of stdin
 * ends it. Bytes are those of frames as the kernel hands them over, headers included. A line may be empty, or spoil a
 * host's link from now on:
 *
 *     link HOST MBIT_PER_S LOSS     this rate, and this share of the frames to and from the host vanishes: 1 cuts it off
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define MAX_HOSTS 64
#define VNET 10                 /* bytes of virtio_net_hdr in front of every frame */
#define ETHERNET 14
#define QUEUE_NS 2000000LL      /* longest backlog of a sending NIC */
#define RETRY_NS 20000LL        /* when a receiver's kernel queue is full */
#define FRAMES_PER_TURN 8

typedef struct frame {
  struct frame *next;
  int64_t due_ns;
  int length;
  unsigned char bytes[];
} frame;

static int num_hosts, tap[MAX_HOSTS], namespace_fd[MAX_HOSTS];
static double bytes_per_ns[MAX_HOSTS];
static int64_t delay_ns, egress_free_ns[MAX_HOSTS], ingress_free_ns[MAX_HOSTS];
static frame *first[MAX_HOSTS], *last[MAX_HOSTS]; /* on their way to a host, by time */
static uint64_t sent[MAX_HOSTS][MAX_HOSTS];
static double loss[MAX_HOSTS];

static void die(const char *what) {
  perror(what);
  exit(1);
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void make_host(int i) {
  if (unshare(CLONE_NEWNET)) die("unshare(CLONE_NEWNET)");
  if ((namespace_fd[i] = open("/proc/self/ns/net", O_RDONLY)) < 0) die("/proc/self/ns/net");
  if ((tap[i] = open("/dev/net/tun", O_RDWR | O_NONBLOCK)) < 0) die("/dev/net/tun");
  struct ifreq request = {.ifr_name = "eth0"};
  request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
  if (ioctl(tap[i], TUNSETIFF, &request)) die("TUNSETIFF");
  int header = VNET;
  if (ioctl(tap[i], TUNSETVNETHDRSZ, &header)) die("TUNSETVNETHDRSZ");
  if (ioctl(tap[i], TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)) die("TUNSETOFFLOAD");
}

/* A frame from host i that leaves its NIC at `egress_end_ns` after `egress_ns` on it: when does it reach host j? */
static void put_on_the_way(int i, int j, const unsigned char *bytes, int length, int64_t egress_end_ns,
                           int64_t egress_ns) {
  int64_t ingress_ns = (int64_t)((length - VNET) / bytes_per_ns[j]);
  int64_t start = egress_end_ns - egress_ns + delay_ns;
  if (start < ingress_free_ns[j]) start = ingress_free_ns[j];
  ingress_free_ns[j] = start + ingress_ns;
  frame *f = malloc(sizeof *f + length);
  if (!f) die("malloc");
  f->next = NULL;
  f->length = length;
  f->due_ns = start + (ingress_ns > egress_ns ? ingress_ns : egress_ns);
  if (last[j] && last[j]->due_ns > f->due_ns) f->due_ns = last[j]->due_ns; /* order is kept */
  memcpy(f->bytes, bytes, length);
  if (last[j])
    last[j]->next = f;
  else
    first[j] = f;
  last[j] = f;
  sent[i][j] += length - VNET;
}

static void read_from(int i) {
  static unsigned char buffer[70000];
  int64_t now = now_ns();
  for (int n = 0; n < FRAMES_PER_TURN && egress_free_ns[i] - now <= QUEUE_NS; n++) {
    int length = read(tap[i], buffer, sizeof buffer);
    if (length <= VNET + ETHERNET) return;
    const unsigned char *to = buffer + VNET;
    int64_t egress_ns = (int64_t)((length - VNET) / bytes_per_ns[i]);
    egress_free_ns[i] = (egress_free_ns[i] > now ? egress_free_ns[i] : now) + egress_ns;
    for (int j = 0; j < num_hosts; j++)
      if (j != i && ((to[0] & 1) || (to[0] == 2 && to[5] == j + 1)) && drand48() >= loss[i] && drand48() >= loss[j])
        put_on_the_way(i, j, buffer, length, egress_free_ns[i], egress_ns);
  }
}

/* Hand over what is due; the time of the next frame, or INT64_MAX. */
static int64_t deliver(void) {
  int64_t now = now_ns(), next = INT64_MAX;
  for (int j = 0; j < num_hosts; j++) {
    while (first[j] && first[j]->due_ns <= now) {
      frame *f = first[j];
      if (write(tap[j], f->bytes, f->length) < 0 && errno == EAGAIN) {
        f->due_ns = now + RETRY_NS;
        break;
      }
      if (!(first[j] = f->next)) last[j] = NULL;
      free(f);
    }
    if (first[j] && first[j]->due_ns < next) next = first[j]->due_ns;
  }
  return next;
}

static void change_link(const char *line) {
  int host;
  double mbit_per_s, share;
  if (sscanf(line, "link %d %lf %lf", &host, &mbit_per_s, &share) != 3 || host < 0 || host >= num_hosts) return;
  bytes_per_ns[host] = mbit_per_s * 1e6 / 8 / 1e9;
  loss[host] = share;
}

static void print_matrix(void) {
  for (int i = 0; i < num_hosts; i++)
    for (int j = 0; j < num_hosts; j++) printf("%llu ", (unsigned long long)sent[i][j]);
  printf("\n");
  fflush(stdout);
}

int main(int argc, char **argv) {
  if (argc != 4 || (num_hosts = atoi(argv[1])) < 1 || num_hosts > MAX_HOSTS) {
    fprintf(stderr, "usage: netemu HOSTS MBIT_PER_S[,MBIT_PER_S...] DELAY_US   (1 to %d hosts)\n", MAX_HOSTS);
    return 2;
  }
  delay_ns = (int64_t)(atof(argv[3]) * 1000);
  char *rate = strtok(argv[2], ",");
  for (int i = 0; i < num_hosts; i++) {
    bytes_per_ns[i] = rate ? atof(rate) * 1e6 / 8 / 1e9 : bytes_per_ns[i - 1];
    if (rate) rate = strtok(NULL, ",");
  }
  for (int i = 0; i < num_hosts; i++) make_host(i);
  prctl(PR_SET_TIMERSLACK, 1UL, 0, 0, 0);
  struct sched_param priority = {.sched_priority = 50};
  sched_setscheduler(0, SCHED_FIFO, &priority); /* may be refused; frames are then late under load */
  printf("ready");
  for (int i = 0; i < num_hosts; i++) printf(" %d", namespace_fd[i]);
  printf("\n");
  fflush(stdout);
  for (;;) {
    int64_t next = deliver(), now = now_ns();
    struct pollfd polled[MAX_HOSTS + 1] = {{.fd = 0, .events = POLLIN}};
    for (int i = 0; i < num_hosts; i++) {
      int is_full = egress_free_ns[i] - now > QUEUE_NS;
      polled[i + 1] = (struct pollfd){.fd = tap[i], .events = is_full ? 0 : POLLIN};
      if (is_full && egress_free_ns[i] - QUEUE_NS < next) next = egress_free_ns[i] - QUEUE_NS;
    }
    int64_t wait_ns = next > now ? next - now : 0;
    struct timespec wait = {.tv_sec = wait_ns / 1000000000, .tv_nsec = wait_ns % 1000000000};
    if (ppoll(polled, num_hosts + 1, next == INT64_MAX ? NULL : &wait, NULL) <= 0) continue;
    if (polled[0].revents) {
      char line[256];
      int length = read(0, line, sizeof line - 1);
      if (length <= 0) return 0;
      line[length] = 0;
      change_link(line);
      print_matrix();
    }
    for (int i = 0; i < num_hosts; i++)
      if (polled[i + 1].revents & POLLIN) read_from(i);
  }
}
