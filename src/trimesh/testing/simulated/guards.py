"""Guards: operations forbidden in simulated actors, which share one process and one virtual clock (rule S1).

`TABLE` lists the names. `os.kill` would hit the test itself; a socket or a subprocess would run in real time. In an
actor each raises, also when a library calls it for the actor, and the text names a replacement.
"""

from __future__ import annotations

import functools
import importlib
import os
import reprlib
import site
import sys
import sysconfig
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import attrs

from trimesh._runtime.actors.context import execution_context
from trimesh._runtime.life.current import current_proc, find_proc_anywhere

_ELSEWHERE: Final = 'or test it over real processes: `@pytest.mark.mesh_backend("proc")`'

_TOOLS: Final = ("pytest", "_pytest", "pluggy", "xdist", "execnet", "hypothesis", "coverage")
"""Prefixes of packages that run tests: their signal handlers may interrupt an actor's code."""

_OURS: Final = frozenset({"trimesh", "trio", "outcome"})

_WAITING: Final = frozenset(
    {"threading", "queue", "selectors", "subprocess", "socket", "ssl", "asyncio", "concurrent", "multiprocessing"}
)
"""Packages of the standard library that wait in real time, and therefore need real clocks."""


def is_in_actor() -> bool:
    """Return whether the running code, also that of a library, is called by a simulated actor."""
    proc = find_proc_anywhere()
    if proc is None or not proc.is_simulated:
        return False
    try:
        execution_context()
    except RuntimeError:
        return False
    return True


def _module(depth: int) -> str:
    return str(sys._getframe(depth).f_globals.get("__name__", ""))  # noqa: SLF001


def _is_exempt(depth: int) -> bool:
    """Return whether a caller is a tool or the runtime, except `trimesh.testing`, which runs an actor's code inline."""
    module = _module(depth + 1)
    if module.startswith("trimesh."):
        return not module.startswith("trimesh.testing.")
    return module.startswith(_TOOLS)


def is_actor_code(depth: int) -> bool:
    """Return whether a caller is user code in an actor: not the standard library, Trio or this package.

    Args:
        depth: Depth of the frame: 1 for the function that calls this, 2 for its caller.
    """
    package = _module(depth + 1).partition(".")[0]
    return (package not in sys.stdlib_module_names or package == "__main__") and reads_virtual_clock(depth + 1)


def reads_virtual_clock(depth: int) -> bool:
    """Return whether a caller in an actor gets virtual time: all but Trio, tools, and code that waits in real time.

    Args:
        depth: See `is_actor_code`.
    """
    package = _module(depth + 1).partition(".")[0]
    return package not in _OURS and package not in _WAITING and not package.startswith(_TOOLS) and is_in_actor()


@contextmanager
def replaced(changes: Iterable[Change]) -> Generator[None, None, None]:
    """Set attributes, as (owner, name, value), and restore them at the end of the block."""
    made = list(changes)
    before: list[Change] = []
    for owner, name, _ in made:
        own: dict[str, Any] = owner.__dict__
        before.append((owner, name, own.get(name, replaced)))
    for owner, name, value in made:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            if value is replaced:
                delattr(owner, name)  # the attribute was inherited
            else:
                setattr(owner, name, value)


def owner_of(path: str) -> Any:
    """Return the module or class of a row of the table."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def refused() -> list[Change]:
    """Return replacements that refuse the names of the table in simulated actors, and call the real ones elsewhere."""
    return [
        (owner, name, _refusing(getattr(owner, name), refusal, full)) for owner, name, refusal, full in _refused_names()
    ]


def own_pid() -> Change:
    """Return a `getpid` that gives each simulated process a number that no real process has."""
    real = os.getpid

    def getpid() -> int:
        return current_proc().pid if is_actor_code(2) else real()

    return os, "getpid", getpid


@functools.cache
def _refused_names() -> tuple[tuple[Any, str, Refusal, str], ...]:
    return tuple(_names_of_table())


def _names_of_table() -> Iterator[tuple[Any, str, Refusal, str]]:
    for path, row in TABLE.items():
        if row.refused:
            owner = owner_of(path)
            for refusal, names in row.refused.items():
                for name in names.split():
                    if hasattr(owner, name):
                        yield owner, name, refusal, path if name == "__init__" else f"{path}.{name}"


def _refusing(real: Callable[..., Any], refusal: Refusal, name: str) -> Callable[..., Any]:
    is_refused = is_actor_code if refusal.by_name else _is_refused

    @functools.wraps(real)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if is_refused(2) and not _only_reads(refusal.reads, args, kwargs):
            raise RuntimeError(
                f"a simulated actor cannot {refusal.what}: {refusal.because}; got {name}({_told(args)}); "
                f"{refusal.instead}, {_ELSEWHERE}"
            )
        return real(*args, **kwargs)

    return refuse


def _is_refused(depth: int) -> bool:
    return is_in_actor() and not _is_exempt(depth + 1)


def _only_reads(count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return count >= 0 and all(value is None for value in (*args[count:], *kwargs.values()))


def _told(args: tuple[Any, ...]) -> str:
    """Return the numbers and texts among the arguments; others may be long."""
    return ", ".join(reprlib.repr(arg) for arg in args if isinstance(arg, int | float | str | bytes))


# ---- table of the standard library: behaviour in a simulated actor of each name that reads or changes the machine ----

# A name is *virtual* (it follows from the seed and the virtual clock), *real* (it reaches the machine, as the docs
# state), *refused* (it raises, and the text names a replacement) or *pure* (it has no contact with the machine).
# Constants, exceptions and enums are pure without an entry. A test walks the modules, so a name that a new Python adds
# needs a decision.

_SHARED: Final = "all actors of a simulation share one real process"
_REAL_TIME: Final = "it would go on in real time, beside the virtual clock and not by the seed"


@attrs.frozen
class Refusal:
    """Refusal of names: reason, replacement and extent.

    Attributes:
        what: Completes "a simulated actor cannot".
        instead: Replacement, as an instruction.
        because: The reason.
        by_name: Whether only the actor's own code is refused, because the standard library needs the names itself.
        reads: Number of arguments with which a call only reads; -1 for none. A later argument of None counts as absent.
    """

    what: str
    instead: str
    because: str = _SHARED
    by_name: bool = False
    reads: int = -1


@attrs.frozen
class Decisions:
    """Decisions about one module or class.

    Attributes:
        virtual: Names that follow from the seed.
        real: Names that reach the machine.
        note: Description of those, for the docs.
        refused: Names that raise, by their refusal.
        through: Names that raise because they use a refused one.
        pure: Names without contact with the machine; "*" for all others.
    """

    virtual: str = ""
    real: str = ""
    note: str = ""
    refused: Mapping[Refusal, str] = attrs.field(factory=dict[Refusal, str])
    through: str = ""
    pure: str = ""


_KILL = 'plan it from the test: `faults.kill(members, how="sigkill")`, or "sigterm", "sigsegv", "sigstop"'

SIGNAL = Refusal("send signals", _KILL)
END = Refusal("end its process", 'plan it from the test: `faults.kill(members, how="exit(1)")`, or "abort"')
HANDLER = Refusal("change the handling of signals", "let the program that runs the mesh handle signals")
TIMER = Refusal("set a timer of the system", "use `trio.sleep`, `trio.fail_after` or `trio.move_on_after`", _REAL_TIME)
CHILD = Refusal("start a subprocess", "pass in what it would answer", _REAL_TIME)
FORK = Refusal("fork", "spawn processes by `trimesh.this_host().spawn_procs`", _REAL_TIME)
REPLACE = Refusal("replace its program", "pass in what the program would answer")
REAP = Refusal("wait for children", "the block that has spawned processes waits for them")
FOLDER = Refusal("change the working directory", "pass absolute paths, or `dir_fd=`")
MASK = Refusal("change the file mode mask", "pass the mode to `os.open` or `os.chmod`")
USER = Refusal("change the user or group", "leave it to the program that starts the test")
FAMILY = Refusal("change its process group, session or namespace", "leave it to the program that starts the test")
SCHEDULE = Refusal(
    "change how the kernel schedules it", "bind by `spawn_procs(bind=)`; plan slowness: `faults.processor(members)`"
)
PARENT = Refusal("read the number of its parent", "use `trimesh.context()` to find its mesh", by_name=True)
CLOCK = Refusal("set the clock", "plan it from the test: `faults.clock(members).jump(seconds)`")
ZONE = Refusal("change the time zone", "pass a time zone: `datetime.now(zoneinfo.ZoneInfo(name))`", by_name=True)
CPU_CLOCK = Refusal("name the clock of a thread", "use `time.thread_time()`")
LOCALE = Refusal("change the locale", "format by `str.format`, or set it in the program that runs the test", reads=1)
ANY_LOCALE = attrs.evolve(LOCALE, reads=-1)
LIMIT = Refusal("set limits", 'plan scarcity from the test: `faults.resources(members).fails("EMFILE")`')
SOME_LIMIT = attrs.evolve(LIMIT, reads=2)
DNS = Refusal("look up addresses", "use calls, streams and `trimesh.open_channel` between actors", _REAL_TIME)
SOCKET = attrs.evolve(DNS, what="open a socket")
SOCKETS = Refusal("change the defaults of sockets or the name of the host", "leave it to the program under test")
THREAD = Refusal("start a thread", "use `thread=True` or `trio.to_thread.run_sync`", _REAL_TIME)
WAIT = Refusal("wait for another thread", "use `trio.Event`, `trio.Condition` or a channel of Trio", _REAL_TIME)
POLL = attrs.evolve(DNS, what="poll descriptors")
ASYNCIO = Refusal("run asyncio", "write the endpoint with Trio", _REAL_TIME)
WATCHDOG = Refusal("change the handlers of faulthandler", "use `trio.fail_after`")
MAIN = Refusal("interrupt the main thread", 'plan it from the test: `faults.kill(members, how="sigterm")`')

_FILES = (
    "access chmod chown close closerange copy_file_range dup dup2 eventfd eventfd_read eventfd_write fchmod fchown "
    "fdatasync fdopen fpathconf fstat fstatvfs fsync ftruncate fwalk get_blocking get_inheritable get_terminal_size "
    "getcwd getcwdb getxattr grantpt isatty lchown link listdir listxattr lockf lseek lstat makedirs memfd_create "
    "mkdir mkfifo mknod open openpty pathconf pidfd_open pipe pipe2 posix_fadvise posix_fallocate posix_openpt pread "
    "preadv ptsname pwrite pwritev read readinto readlink readv remove removedirs removexattr rename renames replace "
    "rmdir scandir sendfile set_blocking set_inheritable setxattr splice stat statvfs symlink sync tcgetpgrp truncate "
    "ttyname unlink unlockpt utime walk write writev"
)
_MACHINE = (
    "confstr cpu_count ctermid get_exec_path getegid geteuid getgid getgrouplist getgroups getloadavg getlogin getpgid "
    "getpgrp getpriority getresgid getresuid getsid getuid process_cpu_count sched_get_priority_max "
    "sched_get_priority_min sched_getaffinity sched_getparam sched_getscheduler sched_rr_get_interval sched_yield "
    "sysconf uname"
)

TABLE: Final[dict[str, Decisions]] = {
    "time": Decisions(
        virtual="asctime clock_gettime clock_gettime_ns ctime gmtime localtime monotonic monotonic_ns perf_counter "
        "perf_counter_ns process_time process_time_ns sleep strftime thread_time thread_time_ns time time_ns",
        real="clock_getres get_clock_info mktime",
        note="resolution of the clocks, the time zone",
        refused={CLOCK: "clock_settime clock_settime_ns", ZONE: "tzset", CPU_CLOCK: "pthread_getcpuclockid"},
        pure="strptime struct_time",
    ),
    "datetime": Decisions(pure="date datetime datetime_CAPI time timedelta timezone tzinfo"),
    "datetime.date": Decisions(virtual="today", real="fromtimestamp", note="the time zone", pure="*"),
    "datetime.datetime": Decisions(
        virtual="now today utcnow", real="astimezone fromtimestamp timestamp", note="the time zone", pure="*"
    ),
    "sched": Decisions(virtual="scheduler", pure="Event"),
    "random": Decisions(
        virtual="Random SystemRandom betavariate binomialvariate choice choices expovariate gammavariate gauss "
        "getrandbits getstate lognormvariate normalvariate paretovariate randbytes randint random randrange sample "
        "seed setstate shuffle triangular uniform vonmisesvariate weibullvariate",
        pure="main",
    ),
    "secrets": Decisions(
        virtual="SystemRandom choice randbelow randbits token_bytes token_hex token_urlsafe", pure="compare_digest"
    ),
    "uuid": Decisions(virtual="getnode uuid1 uuid4 uuid6 uuid7 uuid8", pure="UUID bytes_ int_ main uuid3 uuid5"),
    "email.utils": Decisions(
        virtual="formatdate localtime make_msgid",
        real="mktime_tz",
        note="`make_msgid` without `domain=` looks up the name of the host, which is refused",
        pure="Charset collapse_rfc2231_value decode_params decode_rfc2231 encode_rfc2231 format_datetime formataddr "
        "getaddresses parseaddr parsedate parsedate_to_datetime parsedate_tz quote unquote",
    ),
    "logging": Decisions(
        virtual="LogRecord makeLogRecord",
        real="addLevelName basicConfig captureWarnings critical debug disable error exception fatal getHandlerByName "
        "getHandlerNames getLogRecordFactory getLogger getLoggerClass info log setLogRecordFactory setLoggerClass "
        "shutdown warn warning FileHandler Logger LoggerAdapter Manager RootLogger StreamHandler",
        note="handlers and levels, which all processes of the run share; `LogRecord.process`",
        pure="BufferingFormatter Filter Filterer Formatter Handler NullHandler PercentStyle PlaceHolder "
        "StrFormatStyle StringTemplateStyle Template currentframe getLevelName getLevelNamesMapping",
    ),
    "os": Decisions(
        virtual="getpid getrandom times urandom",
        real=f"{_FILES} {_MACHINE} getenv getenvb putenv register_at_fork reload_environ unsetenv",
        note="files, descriptors, the environment, hooks of forks, users and facts about the machine",
        refused={
            SIGNAL: "kill killpg",
            END: "_exit abort",
            CHILD: "popen posix_spawn posix_spawnp spawnl spawnle spawnlp spawnlpe spawnv spawnve spawnvp spawnvpe "
            "system",
            FORK: "fork forkpty",
            REPLACE: "execl execle execlp execlpe execv execve execvp execvpe",
            REAP: "wait wait3 wait4 waitid waitpid",
            FOLDER: "chdir chroot fchdir",
            MASK: "umask",
            USER: "initgroups setegid seteuid setgid setgroups setregid setresgid setresuid setreuid setuid",
            FAMILY: "login_tty setns setpgid setpgrp setsid tcsetpgrp unshare",
            SCHEDULE: "nice sched_setaffinity sched_setparam sched_setscheduler setpriority",
            PARENT: "getppid",
            TIMER: "timerfd_create timerfd_gettime timerfd_gettime_ns timerfd_settime timerfd_settime_ns",
        },
        pure="DirEntry PathLike WCOREDUMP WEXITSTATUS WIFCONTINUED WIFEXITED WIFSIGNALED WIFSTOPPED WSTOPSIG WTERMSIG "
        "device_encoding fsdecode fsencode fspath major makedev minor sched_param stat_result statvfs_result strerror "
        "terminal_size times_result uname_result waitid_result waitstatus_to_exitcode",
    ),
    "signal": Decisions(
        real="getitimer getsignal sigpending",
        note="handlers, timers and pending signals of the test's process",
        refused={
            SIGNAL: "pidfd_send_signal pthread_kill raise_signal",
            TIMER: "alarm setitimer",
            HANDLER: "pthread_sigmask set_wakeup_fd siginterrupt signal",
            WAIT: "pause sigtimedwait sigwait sigwaitinfo",
        },
        pure="default_int_handler strsignal struct_siginfo valid_signals",
    ),
    "socket": Decisions(
        virtual="getaddrinfo gethostbyname gethostbyname_ex",
        real="SocketType close dup getdefaulttimeout gethostname getprotobyname getservbyname getservbyport "
        "has_dualstack_ipv6 if_indextoname if_nameindex if_nametoindex recv_fds send_fds",
        note="names of the host, its interfaces and services",
        refused={
            DNS: "gethostbyaddr getnameinfo",
            SOCKET: "fromfd socketpair",
            SOCKETS: "setdefaulttimeout sethostname",
        },
        through="create_connection create_server getfqdn socket",
        pure="CMSG_LEN CMSG_SPACE SocketIO htonl htons inet_aton inet_ntoa inet_ntop inet_pton ntohl ntohs",
    ),
    "socket.socket": Decisions(refused={SOCKET: "__init__"}, pure="*"),
    "select": Decisions(refused={POLL: "epoll poll select"}),
    "selectors": Decisions(through="DefaultSelector EpollSelector PollSelector SelectSelector", pure="*"),
    "selectors._BaseSelectorImpl": Decisions(refused={POLL: "__init__"}, pure="*"),
    "ssl": Decisions(
        virtual="RAND_bytes RAND_pseudo_bytes",
        real="DefaultVerifyPaths RAND_add RAND_status SSLContext create_default_context get_default_verify_paths",
        note="certificates of the machine; what OpenSSL draws by itself",
        through="SSLSocket create_connection get_server_certificate wrap_socket",
        pure="DER_cert_to_PEM_cert MemoryBIO PEM_cert_to_DER_cert SSLObject SSLSession cert_time_to_seconds "
        "get_protocol_name match_hostname socket",
    ),
    "asyncio": Decisions(refused={ASYNCIO: "new_event_loop"}, pure="*"),
    "asyncio.events": Decisions(refused={ASYNCIO: "new_event_loop"}, pure="*"),
    "subprocess": Decisions(
        through="Popen call check_call check_output getoutput getstatusoutput run", pure="CompletedProcess list2cmdline"
    ),
    "subprocess.Popen": Decisions(refused={CHILD: "__init__"}, pure="*"),
    "_posixsubprocess": Decisions(refused={CHILD: "fork_exec"}),
    "multiprocessing": Decisions(
        real="Barrier BoundedSemaphore Condition Event JoinableQueue Lock Pipe Queue RLock RawArray RawValue Semaphore "
        "SimpleQueue active_children allow_connection_pickling cpu_count current_process freeze_support "
        "get_all_start_methods get_context get_logger get_start_method log_to_stderr parent_process set_executable "
        "set_forkserver_preload set_start_method Array Value",
        note="semaphores and pipes of one actor",
        through="Manager Pool Process",
    ),
    "concurrent.futures": Decisions(
        real="wait as_completed",
        note="futures that are done; waiting is refused",
        through="InterpreterPoolExecutor ProcessPoolExecutor ThreadPoolExecutor",
        pure="Executor Future",
    ),
    "threading": Decisions(
        real="Barrier BoundedSemaphore Condition Event Lock RLock Semaphore activeCount active_count currentThread "
        "current_thread enumerate excepthook get_ident get_native_id getprofile gettrace local main_thread setprofile "
        "setprofile_all_threads settrace settrace_all_threads stack_size",
        note="locks, events and the list of threads, which all processes of the run share; waiting is refused",
        through="Thread Timer",
        pure="ExceptHookArgs WeakSet",
    ),
    "threading.Thread": Decisions(
        real="daemon getName ident isDaemon is_alive join name native_id setDaemon setName",
        note="threads that the test has started",
        refused={THREAD: "start"},
        pure="run",
    ),
    "threading.Condition": Decisions(
        real="acquire locked notify notifyAll notify_all release",
        note="a lock that is free",
        refused={WAIT: "wait"},
        through="wait_for",
    ),
    "_thread": Decisions(
        real="LockType RLock allocate allocate_lock exit exit_thread get_ident get_native_id lock set_name stack_size",
        note="as `threading`",
        refused={THREAD: "start_joinable_thread start_new start_new_thread", MAIN: "interrupt_main"},
        pure="daemon_threads_allowed",
    ),
    "locale": Decisions(
        real="atof atoi bind_textdomain_codeset bindtextdomain currency dcgettext delocalize dgettext format "
        "format_string getdefaultlocale getencoding getlocale getpreferredencoding gettext localeconv localize "
        "nl_langinfo str strcoll strxfrm textdomain",
        note="the locale of the test's process",
        refused={LOCALE: "setlocale", ANY_LOCALE: "resetlocale"},
        pure="normalize",
    ),
    "resource": Decisions(
        real="getpagesize getrlimit getrusage",
        note="limits and use of the test's process, its processor time included",
        refused={LIMIT: "setrlimit", SOME_LIMIT: "prlimit"},
        pure="struct_rusage",
    ),
    "platform": Decisions(real="*", note="the machine"),
    "tempfile": Decisions(real="*", note="files; their names are not of the seed"),
    "fcntl": Decisions(real="*", note="files and their locks"),
    "gc": Decisions(real="*", note="the collector, which all processes of the run share"),
    "sys": Decisions(real="*", note="the interpreter, which all processes of the run share"),
    "atexit": Decisions(real="*", note="runs when the process of the test ends"),
    "faulthandler": Decisions(
        real="dump_c_stack dump_traceback enable is_enabled",
        note="the process of the test",
        refused={WATCHDOG: "cancel_dump_traceback_later disable dump_traceback_later register unregister"},
    ),
}
"""Decisions by module or class. Names that a Python version lacks are skipped."""


# ---- copies of names: `from time import monotonic` in a module of the tested program keeps the function itself -------

Change = tuple[Any, str, Any]
"""An attribute and its new value: owner, name, value."""

_INSTALLED: Final = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), *site.getsitepackages()})

_own: Final[set[str]] = set()
"""Names of modules of the tested program and of its tests."""

_installed: Final[set[str]] = {"__main__"}
"""Names of modules that a package manager installed: thousands, so they are inspected once, not in each run."""


def with_copies(changes: Iterable[Change]) -> list[Change]:
    """Return the changes, and those of the same functions under names in modules of the tested program."""
    made = list(changes)
    of_real = {id(getattr(owner, name)): value for owner, name, value in made if isinstance(owner, ModuleType)}
    for module in _own_modules():
        names = vars(module)
        if not of_real.keys().isdisjoint(map(id, names.values())):
            made += [(module, name, of_real[id(held)]) for name, held in names.items() if id(held) in of_real]
    return made


def _own_modules() -> list[ModuleType]:
    """Return the modules that no package manager installed: those of the tested program and its tests."""
    for name in sys.modules.keys() - _own - _installed:
        (_own if _is_own(name) else _installed).add(name)
    main = ("__main__",) if _is_own("__main__") else ()  # checked anew: a notebook, or a test, may replace it
    return [module for name in (*_own, *main) if (module := sys.modules.get(name)) is not None]


def _is_own(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and not file.startswith(_INSTALLED) and name.partition(".")[0] != "trimesh"
