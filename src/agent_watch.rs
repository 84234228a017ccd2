//! Traces that the agent leaves while it waits for GPUs and makes containers, seen without touching
//! it: its looks at the CDI spec, the directories and cgroups of its containers, its own
//! executable, the hooks of ours that it starts. One inotify instance, each trace as an event and
//! as a value ([`Seen`]).
//!
//! In the order in which kata-agent 4.1.0 leaves them, with ms on a quiet guest of 2 CPUs, for a
//! container with a GPU:
//!
//! | ms | trace |
//! |---|---|
//! | 15 | [`Seen::Look`], and again at 241 the first time (the agent builds the validator of specs between the two) |
//! | 283 | [`Seen::Container`] made: the injection has succeeded |
//! | 324 | [`Seen::Cgroup`] made |
//! | 342 | [`Seen::InitBegan`]: the agent starts its executable again, as what becomes the container |
//! | 546 | [`Seen::Cgroup`] populated, after a grace period of RCU |
//! | 640 | [`Seen::HookBegan`], [`Seen::HookEnded`] |
//! | 727 | [`Seen::ProgramBegan`]: that process has replaced the agent's executable by the container's program, or has died |
//!
//! inotify names what was touched, not who did it:
//! - A look is any open of the spec. Nothing else in a guest opens it; this init never reads it
//!   back.
//! - An exec opens the file, and the kernel keeps it open for as long as the program is mapped, so
//!   the file is closed when the process ends or becomes another program (seen with 6.1 and 6.18).
//!   The init's own processes are forks without exec: they are no hooks.
//! - A cgroup is any directory below the mounted cgroup tree. Only the agent makes such
//!   directories; this init makes none.
//!
//! Invariants:
//! - Nothing is polled. /run/kata-containers is removed and made again by the agent: /run is
//!   watched for it. /sys/fs/cgroup may be mounted after the watch began, by the agent as PID 1: a
//!   change of the mounts is an event of /proc/self/mounts.
//! - Equal events that follow each other directly are one: two hooks started at once may be one
//!   `HookBegan`. Events are signs, not counts.
//! - Watches are bounded ([`MAX_CGROUPS`]), and a removed cgroup leaves nothing behind: kernfs
//!   sends no IN_DELETE_SELF, and a watch would keep the inode, so the watch goes with the
//!   IN_DELETE that the parent reports.
//! - cgroup v2: the tree at /sys/fs/cgroup, population from each `cgroup.events`. v1: the tree of
//!   one controller ([`V1`]), population from writes to `cgroup.procs` and `tasks`; nothing reports
//!   there that a cgroup is empty.
//!
//! Watching cgroups ends with [`AgentWatch::stop_cgroups`]; all else is seen for as long as the
//! guest lives.

use crate::cdi::publish::FILE;
use crate::events::names;
use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedSender;

/// cgroups that are watched at once, two watches each. A pod of some ten containers has some
/// twenty. Those above are reported when they are made and removed, but not what happens in them.
const MAX_CGROUPS: usize = 200;
/// v1 controllers whose tree is watched, the first that is mounted.
const V1: &[&str] = &["memory", "pids", "devices", "cpuset", "cpu", "freezer", "blkio"];
/// Directories among those of containers that belong to the sandbox.
const OF_SANDBOX: &[&str] = &["shared", "sandbox", "image"];
/// Longest text that is read of /proc/self/mounts.
const MAX_MOUNTS: u64 = 1024 * 1024;
/// Longest text that is read of a `cgroup.events`: two lines.
const MAX_POPULATION: u64 = 4096;

/// One trace of the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// The agent looked for GPUs.
    Look(Look),
    /// The directory of a container was made, which is its first trace, or removed.
    Container { id: String, change: Change },
    /// The agent's executable was started at least once, as a container's first process. Also PID
    /// 1's own start, for a watch that began before.
    InitBegan,
    /// At least one such process has become its container's program, or has died.
    ProgramBegan,
    /// A cgroup changed; its path is relative to the tree, e.g. `kubepods/pod1/c0ffee`.
    Cgroup { path: String, change: Change },
    /// At least one hook of the init was started. The program runs a little later.
    HookBegan,
    /// At least one process that ran the init's executable has ended.
    HookEnded,
}

/// What the agent looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    Spec,
    /// While there is no spec, the directory is all there is to see.
    Directory,
}

/// What became of a container or cgroup; containers are only made and removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Made,
    /// v2: its first process has come, to it or below it. v1: a process was moved to it.
    Populated,
    /// v2: its last process has gone.
    Emptied,
    Removed,
}

impl fmt::Display for Look {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Spec => "spec",
            Self::Directory => "directory",
        })
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Made => "made",
            Self::Populated => "populated",
            Self::Emptied => "emptied",
            Self::Removed => "removed",
        })
    }
}

/// What is watched.
#[derive(Clone, Debug)]
pub struct Places {
    /// The directory of CDI specs, which must be there.
    pub specs: PathBuf,
    /// The executable that the spec names for hooks. None: hooks are not watched.
    pub hook: Option<PathBuf>,
    /// The agent's executable. None: the processes of containers are not watched.
    pub agent: Option<PathBuf>,
    /// The directory of containers, which may come and go; the one that it is in must be there.
    pub containers: PathBuf,
    /// Where cgroups are mounted, or will be. None: they are not watched.
    pub cgroups: Option<PathBuf>,
    /// The mounts as the kernel lists them, pollable.
    pub mounts: PathBuf,
}

impl Places {
    /// Those of a guest.
    pub fn of_guest(agent: &Path, hook: Option<PathBuf>) -> Self {
        Self {
            specs: crate::cdi::publish::DIRECTORY.into(),
            hook,
            agent: Some(agent.into()),
            containers: "/run/kata-containers".into(),
            cgroups: Some("/sys/fs/cgroup".into()),
            mounts: "/proc/self/mounts".into(),
        }
    }
}

/// The watch that runs. Dropping this ends nothing.
#[derive(Clone, Debug)]
pub struct AgentWatch {
    stop_cgroups: Arc<Notify>,
}

impl AgentWatch {
    /// Ends the watch of cgroups for good and frees what it needs.
    pub fn stop_cgroups(&self) {
        self.stop_cgroups.notify_one();
    }
}

/// Starts to watch, for ever; must be called inside the runtime. Whoever holds the receiver of
/// `seen` must read it or drop it. Fails where the specs cannot be watched; what else cannot is an
/// event.
pub fn start(places: Places, seen: UnboundedSender<Seen>) -> io::Result<AgentWatch> {
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
    let mut watch = Watch { inotify, watched: HashMap::new(), groups: BTreeMap::new(), tree: None, places, seen };
    let specs = watch.inotify.add_watch(&watch.places.specs, AddWatchFlags::IN_OPEN)?;
    watch.watched.insert(specs, Place::Specs);
    let program = AddWatchFlags::IN_OPEN | AddWatchFlags::IN_CLOSE_NOWRITE;
    let around = watch.places.containers.parent().map(Path::to_path_buf);
    for (file, mask, place) in [
        (watch.places.hook.clone(), program, Place::Hook),
        (watch.places.agent.clone(), program, Place::Agent),
        (around, AddWatchFlags::IN_CREATE | AddWatchFlags::IN_ONLYDIR, Place::Run),
    ] {
        let Some(file) = file else { continue };
        match watch.inotify.add_watch(&file, mask) {
            Ok(descriptor) => drop(watch.watched.insert(descriptor, place)),
            Err(errno) => unavailable(&format!("watch {}: {errno}: the agent's work there is not seen", file.display())),
        }
    }
    watch.find_containers(Report::No);
    // Opened before the first look at it: a mount in between is an event then.
    let mounts = File::open(&watch.places.mounts).and_then(|file| crate::sys::async_fd(file.into()));
    let mounts = mounts.map_err(|e| unavailable(&format!("watch {}: {e}: later mounts are not seen", watch.places.mounts.display()))).ok();
    let readiness: OwnedFd = watch.inotify.as_fd().try_clone_to_owned()?;
    let readiness = crate::sys::async_fd(readiness)?;
    let stop_cgroups = Arc::new(Notify::new());
    tokio::spawn(run(watch, readiness, mounts, Arc::clone(&stop_cgroups)));
    Ok(AgentWatch { stop_cgroups })
}

fn unavailable(error: &str) {
    tracing::warn!(name: names::SINK, sink = "agent watch", state = "unavailable", error);
}

async fn run(mut watch: Watch, events: AsyncFd<OwnedFd>, mounts: Option<AsyncFd<OwnedFd>>, stop: Arc<Notify>) {
    // Those that are there already are an earlier worker's.
    watch.find_tree(Report::No);
    let mut mounts = mounts.filter(|_| watch.tree.is_none() && watch.places.cgroups.is_some());
    let mut stopped = false;
    loop {
        tokio::select! {
            ready = events.readable() => {
                let Ok(mut guard) = ready else { return };
                match watch.inotify.read_events() {
                    Ok(events) => events.iter().for_each(|event| watch.take(event)),
                    Err(Errno::EAGAIN) => guard.clear_ready(),
                    Err(Errno::EINTR) => {}
                    Err(_) => return, // inotify fails for good only when its descriptor is gone
                }
            }
            ready = changed(mounts.as_ref()) => {
                if ready.is_ok() {
                    watch.find_tree(Report::Yes);
                }
                if ready.is_err() || watch.tree.is_some() {
                    mounts = None;
                }
            }
            () = stop.notified(), if !stopped => {
                stopped = true;
                mounts = None;
                watch.forget_tree();
            }
        }
    }
}

/// Returns when the mounts have changed; at once the first time.
async fn changed(mounts: Option<&AsyncFd<OwnedFd>>) -> io::Result<()> {
    match mounts {
        Some(mounts) => mounts.readable().await.map(|mut guard| guard.clear_ready()),
        None => std::future::pending().await,
    }
}

/// Where a mounted cgroup tree is, and of which kind.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Tree {
    root: PathBuf,
    unified: bool,
}

/// The tree that the agent uses: v2 where that is mounted at `at` itself, else the first of [`V1`]
/// below it.
fn tree_in(mounts: &str, at: &Path) -> Option<Tree> {
    let mounts: Vec<[&str; 3]> = mounts
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ').skip(1);
            Some([words.next()?, words.next()?, words.next()?])
        })
        .collect();
    if mounts.iter().any(|[target, fs, _]| *fs == "cgroup2" && Path::new(target) == at) {
        return Some(Tree { root: at.into(), unified: true });
    }
    let v1 = |controller: &&str| {
        mounts.iter().find(|[target, fs, options]| {
            *fs == "cgroup" && Path::new(target).starts_with(at) && options.split(',').any(|o| o == *controller)
        })
    };
    V1.iter().find_map(v1).map(|[target, ..]| Tree { root: target.into(), unified: false })
}

/// What a watch is for. Paths are relative to the tree, "" its root.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Specs,
    Hook,
    Agent,
    /// Where the directory of containers is made.
    Run,
    Containers,
    Group(String),
    /// `cgroup.events` of that cgroup.
    Population(String),
}

/// What an event says.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Meaning {
    Nothing,
    Seen(Seen),
    /// Read `cgroup.events` of this cgroup: its population may be another one.
    Population(String),
    /// The directory of containers may be there now.
    Containers,
    /// The kernel has given up a watch.
    Gone,
}

/// `published`: whether there is a spec.
fn meaning(place: &Place, mask: AddWatchFlags, name: Option<&str>, published: bool) -> Meaning {
    let directory = mask.contains(AddWatchFlags::IN_ISDIR);
    if mask.contains(AddWatchFlags::IN_IGNORED) {
        return Meaning::Gone;
    }
    match (place, name) {
        (Place::Specs, Some(FILE)) => Meaning::Seen(Seen::Look(Look::Spec)),
        (Place::Specs, None) if directory && !published => Meaning::Seen(Seen::Look(Look::Directory)),
        // Our own temporary file, and the directory on the way to a spec that is there.
        (Place::Specs, _) => Meaning::Nothing,
        (Place::Hook, _) if mask.contains(AddWatchFlags::IN_OPEN) => Meaning::Seen(Seen::HookBegan),
        (Place::Hook, _) if mask.contains(AddWatchFlags::IN_CLOSE_NOWRITE) => Meaning::Seen(Seen::HookEnded),
        (Place::Agent, _) if mask.contains(AddWatchFlags::IN_OPEN) => Meaning::Seen(Seen::InitBegan),
        (Place::Agent, _) if mask.contains(AddWatchFlags::IN_CLOSE_NOWRITE) => Meaning::Seen(Seen::ProgramBegan),
        (Place::Hook | Place::Agent, _) => Meaning::Nothing,
        (Place::Run, _) if directory => Meaning::Containers,
        (Place::Run, _) => Meaning::Nothing,
        (Place::Containers, Some(name)) if directory && !OF_SANDBOX.contains(&name) => {
            let change = if mask.contains(AddWatchFlags::IN_CREATE) { Change::Made } else { Change::Removed };
            Meaning::Seen(Seen::Container { id: name.into(), change })
        }
        (Place::Containers, _) => Meaning::Nothing,
        (Place::Group(parent), Some(name)) => {
            let change = if directory && mask.contains(AddWatchFlags::IN_CREATE) {
                Change::Made
            } else if directory && mask.contains(AddWatchFlags::IN_DELETE) {
                Change::Removed
            } else if mask.contains(AddWatchFlags::IN_MODIFY) && ["cgroup.procs", "tasks"].contains(&name) {
                return Meaning::Seen(Seen::Cgroup { path: parent.clone(), change: Change::Populated });
            } else {
                return Meaning::Nothing;
            };
            Meaning::Seen(Seen::Cgroup { path: below(parent, name), change })
        }
        (Place::Group(_), None) => Meaning::Nothing,
        (Place::Population(group), _) if mask.contains(AddWatchFlags::IN_MODIFY) => Meaning::Population(group.clone()),
        (Place::Population(_), _) => Meaning::Nothing,
    }
}

fn below(parent: &str, name: &str) -> String {
    if parent.is_empty() { name.into() } else { format!("{parent}/{name}") }
}

/// Whether a cgroup has processes, by its `cgroup.events`.
fn populated(text: &str) -> Option<bool> {
    text.lines().find_map(|line| line.strip_prefix("populated ")).map(|value| value.trim() == "1")
}

/// Names of the directories in a directory.
fn folders(directory: &Path) -> impl Iterator<Item = String> + use<> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.file_name().to_string_lossy().into_owned())
}

/// A cgroup that is watched.
struct Group {
    directory: WatchDescriptor,
    events: Option<WatchDescriptor>,
    populated: bool,
}

/// Whether what is found is news.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Report {
    Yes,
    No,
}

struct Watch {
    inotify: Inotify,
    watched: HashMap<WatchDescriptor, Place>,
    groups: BTreeMap<String, Group>,
    tree: Option<Tree>,
    places: Places,
    seen: UnboundedSender<Seen>,
}

impl Watch {
    fn take(&mut self, event: &InotifyEvent) {
        if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
            self.resume();
            return;
        }
        // Events of a watch that was given up are still in the queue.
        let Some(place) = self.watched.get(&event.wd) else { return };
        let name = event.name.as_deref().map(|n| n.to_string_lossy());
        match meaning(place, event.mask, name.as_deref(), self.places.specs.join(FILE).exists()) {
            Meaning::Nothing => {}
            Meaning::Gone => match self.watched.remove(&event.wd) {
                Some(Place::Group(path)) => self.forget(&path),
                Some(Place::Specs | Place::Hook | Place::Agent | Place::Run | Place::Containers | Place::Population(_)) | None => {}
            },
            Meaning::Containers => self.find_containers(Report::Yes),
            Meaning::Population(path) => self.look_at_population(&path, Report::Yes),
            Meaning::Seen(Seen::Cgroup { path, change: Change::Made }) => self.add(path, Report::Yes),
            Meaning::Seen(Seen::Cgroup { path, change: Change::Removed }) => {
                self.forget(&path);
                self.report(Seen::Cgroup { path, change: Change::Removed });
            }
            Meaning::Seen(seen) => self.report(seen),
        }
    }

    fn report(&self, seen: Seen) {
        // What is done once for a container, and what it waits for; the rest is detail.
        match &seen {
            Seen::Look(what) => tracing::info!(name: names::AGENT_LOOK, what = %what),
            Seen::Container { id, change: change @ Change::Made } => {
                tracing::info!(name: names::AGENT_CONTAINER, container = id.as_str(), what = %change);
            }
            Seen::Container { id, change } => tracing::debug!(name: names::AGENT_CONTAINER, container = id.as_str(), what = %change),
            Seen::InitBegan => tracing::debug!(name: names::AGENT_CONTAINER, what = "init began"),
            Seen::ProgramBegan => tracing::debug!(name: names::AGENT_CONTAINER, what = "program began"),
            Seen::Cgroup { path, change } => tracing::debug!(name: names::AGENT_CONTAINER, cgroup = path.as_str(), what = %change),
            Seen::HookBegan => tracing::debug!(name: names::AGENT_HOOK, what = "began"),
            Seen::HookEnded => tracing::debug!(name: names::AGENT_HOOK, what = "ended"),
        }
        // Nobody listens any more: the events are enough.
        let _unused = self.seen.send(seen);
    }

    /// Watches the directory of containers if it is there.
    fn find_containers(&mut self, report: Report) {
        let mask = AddWatchFlags::IN_CREATE | AddWatchFlags::IN_DELETE | AddWatchFlags::IN_ONLYDIR;
        let Ok(descriptor) = self.inotify.add_watch(&self.places.containers, mask) else { return };
        // The same directory has the same descriptor: nothing is new then.
        if self.watched.insert(descriptor, Place::Containers).is_some() || report == Report::No {
            return;
        }
        for id in folders(&self.places.containers).filter(|id| !OF_SANDBOX.contains(&id.as_str())) {
            self.report(Seen::Container { id, change: Change::Made });
        }
    }

    /// Looks whether the tree is mounted, and watches it.
    fn find_tree(&mut self, report: Report) {
        let Some(cgroups) = &self.places.cgroups else { return };
        let mut text = Vec::new();
        if File::open(&self.places.mounts).and_then(|f| f.take(MAX_MOUNTS).read_to_end(&mut text)).is_err() {
            return; // there is no tree then either, and the next change brings us back
        }
        self.tree = tree_in(&String::from_utf8_lossy(&text), cgroups);
        if self.tree.is_some() {
            self.add(String::new(), report);
        }
    }

    /// Watches a cgroup and those below it. One that is made while this looks is found by the
    /// watch, or by the look, or by both: reported once.
    fn add(&mut self, path: String, report: Report) {
        let Some(tree) = self.tree.clone() else { return };
        let mut found = vec![path];
        while let Some(path) = found.pop() {
            if self.groups.contains_key(&path) {
                continue;
            }
            if report == Report::Yes && !path.is_empty() {
                self.report(Seen::Cgroup { path: path.clone(), change: Change::Made });
            }
            if self.groups.len() >= MAX_CGROUPS {
                continue;
            }
            let directory = tree.root.join(&path);
            let mut mask = AddWatchFlags::IN_CREATE | AddWatchFlags::IN_DELETE | AddWatchFlags::IN_ONLYDIR;
            if !tree.unified {
                mask |= AddWatchFlags::IN_MODIFY;
            }
            // Removed again already, or no watch left: it is not followed.
            let Ok(descriptor) = self.inotify.add_watch(&directory, mask) else { continue };
            self.watched.insert(descriptor, Place::Group(path.clone()));
            // The root has none, and v1 has none at all.
            let events = self.inotify.add_watch(&directory.join("cgroup.events"), AddWatchFlags::IN_MODIFY).ok();
            if let Some(events) = events {
                self.watched.insert(events, Place::Population(path.clone()));
            }
            self.groups.insert(path.clone(), Group { directory: descriptor, events, populated: false });
            self.look_at_population(&path, report);
            found.extend(folders(&directory).map(|name| below(&path, &name)));
        }
    }

    fn look_at_population(&mut self, path: &str, report: Report) {
        let (Some(tree), Some(group)) = (&self.tree, self.groups.get_mut(path)) else { return };
        if group.events.is_none() {
            return;
        }
        let mut text = String::new();
        let file = tree.root.join(path).join("cgroup.events");
        if File::open(file).and_then(|f| f.take(MAX_POPULATION).read_to_string(&mut text)).is_err() {
            return; // removed meanwhile, which is an event of its own
        }
        let Some(now) = populated(&text).filter(|now| *now != group.populated) else { return };
        group.populated = now;
        if report == Report::Yes {
            let change = if now { Change::Populated } else { Change::Emptied };
            self.report(Seen::Cgroup { path: path.into(), change });
        }
    }

    /// Gives up the watches of a cgroup and of those below it.
    fn forget(&mut self, path: &str) {
        let inside = format!("{path}/");
        let gone: Vec<String> = self.groups.keys().filter(|p| *p == path || p.starts_with(&inside) || path.is_empty()).cloned().collect();
        for path in gone {
            let Some(Group { directory, events, .. }) = self.groups.remove(&path) else { continue };
            for descriptor in [Some(directory), events].into_iter().flatten() {
                self.watched.remove(&descriptor);
                // The kernel may have given it up before.
                let _unused = self.inotify.rm_watch(descriptor);
            }
        }
    }

    fn forget_tree(&mut self) {
        self.forget("");
        self.tree = None;
    }

    /// The queue ran over: what was removed meanwhile is forgotten, what was made is found.
    fn resume(&mut self) {
        tracing::warn!(name: names::SINK, sink = "agent watch", state = "overrun");
        self.find_containers(Report::Yes);
        let Some(tree) = self.tree.clone() else { return };
        let known: Vec<String> = self.groups.keys().cloned().collect();
        for path in known {
            if !tree.root.join(&path).is_dir() {
                self.forget(&path);
                self.report(Seen::Cgroup { path, change: Change::Removed });
            } else {
                self.look_at_population(&path, Report::Yes);
            }
        }
        let known: Vec<String> = self.groups.keys().cloned().collect();
        for path in known {
            // Those that are known are passed over there.
            folders(&tree.root.join(&path)).for_each(|name| self.add(below(&path, &name), Report::Yes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::time::Duration;
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    const OPEN: AddWatchFlags = AddWatchFlags::IN_OPEN;
    const CREATE: AddWatchFlags = AddWatchFlags::IN_CREATE;
    const DIRECTORY: AddWatchFlags = AddWatchFlags::IN_ISDIR;

    fn cgroup(path: &str, change: Change) -> Seen {
        Seen::Cgroup { path: path.into(), change }
    }

    #[test]
    fn a_look_is_an_open_of_the_spec_or_of_its_directory_while_there_is_none() {
        let look = |mask, name, published| meaning(&Place::Specs, mask, name, published);
        assert_eq!(look(OPEN, Some("nvidia.yaml"), true), Meaning::Seen(Seen::Look(Look::Spec)));
        assert_eq!(look(OPEN | DIRECTORY, None, false), Meaning::Seen(Seen::Look(Look::Directory)));
        assert_eq!(look(OPEN | DIRECTORY, None, true), Meaning::Nothing);
        assert_eq!(look(OPEN, Some("nvidia.yaml.tmp"), false), Meaning::Nothing);
        assert_eq!(look(OPEN, None, false), Meaning::Nothing);
    }

    #[test]
    fn a_cgroup_is_a_directory_that_is_made_and_a_hook_an_open_of_the_executable() {
        let group = |mask, name| meaning(&Place::Group("pod1".into()), mask, name, true);
        assert_eq!(group(CREATE | DIRECTORY, Some("c0")), Meaning::Seen(cgroup("pod1/c0", Change::Made)));
        assert_eq!(group(AddWatchFlags::IN_DELETE | DIRECTORY, Some("c0")), Meaning::Seen(cgroup("pod1/c0", Change::Removed)));
        assert_eq!(group(CREATE, Some("c0")), Meaning::Nothing);
        assert_eq!(group(AddWatchFlags::IN_MODIFY, Some("pids.max")), Meaning::Nothing);
        assert_eq!(group(AddWatchFlags::IN_MODIFY, Some("cgroup.procs")), Meaning::Seen(cgroup("pod1", Change::Populated)));
        assert_eq!(group(AddWatchFlags::IN_IGNORED, None), Meaning::Gone);
        let root = meaning(&Place::Group(String::new()), CREATE | DIRECTORY, Some("pod1"), true);
        assert_eq!(root, Meaning::Seen(cgroup("pod1", Change::Made)));
        let events = meaning(&Place::Population("pod1".into()), AddWatchFlags::IN_MODIFY, None, true);
        assert_eq!(events, Meaning::Population("pod1".into()));
        assert_eq!(meaning(&Place::Hook, OPEN, None, true), Meaning::Seen(Seen::HookBegan));
        assert_eq!(meaning(&Place::Hook, AddWatchFlags::IN_CLOSE_NOWRITE, None, true), Meaning::Seen(Seen::HookEnded));
        assert_eq!(meaning(&Place::Hook, AddWatchFlags::IN_DELETE_SELF, None, true), Meaning::Nothing);
    }

    #[test]
    fn a_container_is_a_directory_among_the_agents_and_its_process_an_open_of_the_agent() {
        let container = |mask, name| meaning(&Place::Containers, mask, name, true);
        let seen = |change| Meaning::Seen(Seen::Container { id: "c0ffee".into(), change });
        assert_eq!(container(CREATE | DIRECTORY, Some("c0ffee")), seen(Change::Made));
        assert_eq!(container(AddWatchFlags::IN_DELETE | DIRECTORY, Some("c0ffee")), seen(Change::Removed));
        assert_eq!(container(CREATE, Some("file")), Meaning::Nothing);
        assert_eq!(container(CREATE | DIRECTORY, Some("shared")), Meaning::Nothing);
        assert_eq!(meaning(&Place::Run, CREATE | DIRECTORY, Some("kata-containers"), true), Meaning::Containers);
        assert_eq!(meaning(&Place::Run, CREATE, Some("x"), true), Meaning::Nothing);
        assert_eq!(meaning(&Place::Agent, OPEN, None, true), Meaning::Seen(Seen::InitBegan));
        assert_eq!(meaning(&Place::Agent, AddWatchFlags::IN_CLOSE_NOWRITE, None, true), Meaning::Seen(Seen::ProgramBegan));
    }

    #[test]
    fn the_tree_is_the_unified_one_or_one_controllers() {
        let tree = |mounts: &str| tree_in(mounts, Path::new("/sys/fs/cgroup")).map(|t| (t.root.display().to_string(), t.unified));
        let before = "proc /proc proc rw 0 0\nsysfs /sys sysfs rw 0 0\n";
        assert_eq!(tree(before), None);
        let unified = format!("{before}cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid,nodev,noexec,relatime,nsdelegate 0 0\n");
        assert_eq!(tree(&unified), Some(("/sys/fs/cgroup".into(), true)));
        let v1 = "tmpfs /sys/fs/cgroup tmpfs ro 0 0\ncgroup /sys/fs/cgroup/systemd cgroup rw,name=systemd 0 0\n";
        assert_eq!(tree(v1), None);
        let v1 =
            format!("{v1}cgroup /sys/fs/cgroup/pids cgroup rw,pids 0 0\ncgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n");
        assert_eq!(tree(&v1), Some(("/sys/fs/cgroup/pids".into(), false)));
        // A second tree beside v1 is not where the agent makes its own.
        let hybrid = format!("{v1}cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\ncgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n");
        assert_eq!(tree(&hybrid), Some(("/sys/fs/cgroup/memory".into(), false)));
        // Somebody else's, and lines that are none.
        assert_eq!(tree("cgroup2 /run/c/sys/fs/cgroup cgroup2 rw 0 0\nx\n\n  \n"), None);
    }

    #[test]
    fn a_population_is_read_by_its_key() {
        assert_eq!(populated("populated 1\nfrozen 0\n"), Some(true));
        assert_eq!(populated("frozen 1\npopulated 0\n"), Some(false));
        assert_eq!(populated("frozen 1\n"), None);
    }

    /// A guest's places in a directory of their own; its cgroups are plain directories.
    struct Guest {
        root: PathBuf,
        watch: AgentWatch,
        seen: UnboundedReceiver<Seen>,
    }

    impl Guest {
        fn start(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("kata-gpu-init-watch-{name}-{}", std::process::id()));
            let _unused = fs::remove_dir_all(&root);
            let [specs, hook, agent, containers, cgroups, mounts] =
                ["cdi", "init", "agent", "run/containers", "cgroup", "mounts"].map(|name| root.join(name));
            for directory in [&specs, &root.join("run"), &cgroups.join("old")] {
                fs::create_dir_all(directory).unwrap();
            }
            for file in [&hook, &agent] {
                fs::write(file, "").unwrap();
            }
            fs::write(&mounts, format!("cgroup2 {} cgroup2 rw 0 0\n", cgroups.display())).unwrap();
            let places = Places { specs, hook: Some(hook), agent: Some(agent), containers, cgroups: Some(cgroups), mounts };
            let (sender, seen) = unbounded_channel();
            let watch = start(places, sender).unwrap();
            Self { root, watch, seen }
        }

        /// Makes a cgroup as the kernel does, with its files.
        fn make(&self, path: &str) {
            let place = self.root.join("cgroup").join(path);
            fs::create_dir(&place).unwrap();
            fs::write(place.join("cgroup.events"), "populated 0\nfrozen 0\n").unwrap();
        }

        fn write(&self, path: &str, text: &str) {
            fs::write(self.root.join(path), text).unwrap();
        }

        async fn next(&mut self) -> Seen {
            tokio::time::timeout(Duration::from_secs(60), self.seen.recv()).await.expect("nothing is seen").unwrap()
        }
    }

    impl Drop for Guest {
        fn drop(&mut self) {
            let _unused = fs::remove_dir_all(&self.root);
        }
    }

    #[tokio::test]
    async fn a_container_is_seen_from_the_first_look_to_its_removal() {
        let mut guest = Guest::start("container");
        // The watch begins when the runtime is free.
        tokio::task::yield_now().await;
        let spec = guest.root.join("cdi/nvidia.yaml");
        fs::write(&spec, "{}").unwrap();
        assert_eq!(guest.next().await, Seen::Look(Look::Spec));
        guest.make("old/c0");
        assert_eq!(guest.next().await, cgroup("old/c0", Change::Made));
        guest.write("cgroup/old/c0/cgroup.events", "populated 1\nfrozen 0\n");
        assert_eq!(guest.next().await, cgroup("old/c0", Change::Populated));
        drop(File::open(guest.root.join("init")).unwrap());
        assert_eq!([guest.next().await, guest.next().await], [Seen::HookBegan, Seen::HookEnded]);
        guest.write("cgroup/old/c0/cgroup.events", "populated 0\nfrozen 0\n");
        assert_eq!(guest.next().await, cgroup("old/c0", Change::Emptied));
        fs::remove_dir_all(guest.root.join("cgroup/old/c0")).unwrap();
        assert_eq!(guest.next().await, cgroup("old/c0", Change::Removed));
        // One below a new one, made before that one can be watched.
        guest.make("pod");
        guest.make("pod/c1");
        assert_eq!([guest.next().await, guest.next().await], [cgroup("pod", Change::Made), cgroup("pod/c1", Change::Made)]);
        let made = |id: &str| Seen::Container { id: id.into(), change: Change::Made };
        // The directory of containers comes with its first one, goes, and comes again.
        for id in ["pause", "work"] {
            fs::create_dir_all(guest.root.join("run/containers").join(id)).unwrap();
            assert_eq!(guest.next().await, made(id));
            fs::create_dir(guest.root.join("run/containers/second")).unwrap();
            assert_eq!(guest.next().await, made("second"));
            fs::remove_dir_all(guest.root.join("run/containers")).unwrap();
            for _ in 0..2 {
                assert!(matches!(guest.next().await, Seen::Container { change: Change::Removed, .. }));
            }
        }
        drop(File::open(guest.root.join("agent")).unwrap());
        assert_eq!([guest.next().await, guest.next().await], [Seen::InitBegan, Seen::ProgramBegan]);
        guest.watch.stop_cgroups();
        drop(File::open(&spec).unwrap());
        assert_eq!(guest.next().await, Seen::Look(Look::Spec));
        tokio::task::yield_now().await;
        guest.make("late");
        drop(File::open(&spec).unwrap());
        assert_eq!(guest.next().await, Seen::Look(Look::Spec));
    }

    fn watch_of(root: &Path) -> (Watch, UnboundedReceiver<Seen>) {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).unwrap();
        let (seen, receiver) = unbounded_channel();
        let tree = Some(Tree { root: root.into(), unified: true });
        let places = Places::of_guest(root, None);
        let mut watch = Watch { inotify, watched: HashMap::new(), groups: BTreeMap::new(), tree, places, seen };
        watch.add(String::new(), Report::No);
        (watch, receiver)
    }

    fn drain(watch: &mut Watch) {
        while let Ok(events) = watch.inotify.read_events() {
            events.iter().for_each(|event| watch.take(event));
        }
    }

    #[test]
    fn cgroups_that_come_and_go_leave_nothing_behind_and_too_many_are_not_followed() {
        let root = std::env::temp_dir().join(format!("kata-gpu-init-watch-many-{}", std::process::id()));
        let _unused = fs::remove_dir_all(&root);
        fs::create_dir_all(&root).unwrap();
        let (mut watch, mut seen) = watch_of(&root);
        for n in 0..2000 {
            fs::create_dir_all(root.join(format!("pod{n}/c"))).unwrap();
            drain(&mut watch);
            fs::remove_dir_all(root.join(format!("pod{n}"))).unwrap();
            drain(&mut watch);
        }
        assert_eq!((watch.groups.len(), watch.watched.len()), (1, 1));
        for n in 0..MAX_CGROUPS + 50 {
            fs::create_dir(root.join(format!("many{n}"))).unwrap();
            drain(&mut watch);
        }
        assert_eq!((watch.groups.len(), watch.watched.len()), (MAX_CGROUPS, MAX_CGROUPS));
        let mut made = 0;
        while let Ok(seen) = seen.try_recv() {
            made += usize::from(matches!(seen, Seen::Cgroup { change: Change::Made, .. }));
        }
        assert_eq!(made, 2000 * 2 + MAX_CGROUPS + 50);
        watch.forget_tree();
        drain(&mut watch);
        assert_eq!((watch.groups.len(), watch.watched.len()), (0, 0));
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn after_an_overrun_of_the_queue_what_is_there_counts() {
        let root = std::env::temp_dir().join(format!("kata-gpu-init-watch-overrun-{}", std::process::id()));
        let _unused = fs::remove_dir_all(&root);
        fs::create_dir_all(root.join("gone")).unwrap();
        let (mut watch, mut seen) = watch_of(&root);
        fs::remove_dir(root.join("gone")).unwrap();
        fs::create_dir_all(root.join("new/c")).unwrap();
        watch.resume();
        // What was in the queue before says the same again, and is not reported again but for the
        // removal.
        drain(&mut watch);
        let mut all = Vec::new();
        while let Ok(seen) = seen.try_recv() {
            all.push(seen);
        }
        all.truncate(3);
        assert_eq!(all, [cgroup("gone", Change::Removed), cgroup("new", Change::Made), cgroup("new/c", Change::Made)]);
        assert_eq!(watch.groups.keys().collect::<Vec<_>>(), ["", "new", "new/c"]);
        fs::remove_dir_all(root).unwrap();
    }
}
