//! Traces of the agent while it waits for GPUs and makes containers: its looks at the CDI spec, the
//! directories of its containers, its own executable, and this init's hooks that the agent starts.
//! A single inotify instance is used; the agent is not modified. Each trace is an event and a value
//! ([`Seen`]).
//!
//! Traces of kata-agent 4.1.0 for a container with a GPU, in order, in ms on a quiet guest of 2
//! CPUs:
//!
//! | ms | trace |
//! |---|---|
//! | 15 | [`Seen::Look`]; the first time again at 241, after building the validator of specs |
//! | 283 | [`Seen::Container`] made: the injection has succeeded |
//! | 342 | [`Seen::InitBegan`]: the agent starts its executable again, as the container's process |
//! | 640 | [`Seen::HookBegan`], [`Seen::HookEnded`] |
//! | 727 | [`Seen::ProgramBegan`]: that process runs the container's program, or has died |
//!
//! inotify reports the file, not the process that opened it:
//! - A look is any open of the spec. Only the agent opens the spec in a guest; this init never
//!   reads it back.
//! - An exec opens the file, and the kernel keeps the file open for as long as the program is
//!   mapped. So the file is closed when the process ends or becomes another program (seen with 6.1
//!   and 6.18). The init's own processes are forks without exec, so they do not count as hooks.
//!
//! Invariants:
//! - Nothing is polled. The agent removes and remakes /run/kata-containers, so /run is watched,
//!   too.
//! - The kernel merges equal events that follow each other directly: two hooks started at once may
//!   be one `HookBegan`. Events are no counts.
//! - The number of watches is fixed: five.
//! - Traces dropped by an overrun of the kernel's queue stay lost, and an event reports the
//!   overrun. Every wait for a trace has a deadline of its own.

use crate::cdi::publish::FILE;
use kata_gpu_wire::{named, names};
use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc::UnboundedSender;

/// Directories next to those of containers that belong to the sandbox.
const OF_SANDBOX: &[&str] = &["shared", "sandbox", "image"];

/// A trace of the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// The agent looked for GPUs.
    Look(Look),
    /// The directory of a container was made, which is the container's first trace, or removed.
    Container { id: String, change: Change },
    /// The agent's executable was started at least once, as a container's first process. For a
    /// watch that began before PID 1 became the agent, also PID 1's own start.
    InitBegan,
    /// At least one such process has become its container's program, or has died.
    ProgramBegan,
    /// At least one hook of the init was started. The program runs a little later.
    HookBegan,
    /// At least one process that ran the init's executable has ended.
    HookEnded,
}

named! {
    /// File or directory that the agent opened.
    pub enum Look {
        Spec = "spec",
        /// The spec's directory, while there is no spec.
        Directory = "directory",
    }
}

named! {
    /// Change of a container's directory.
    pub enum Change {
        Made = "made",
        Removed = "removed",
    }
}

/// Paths to watch.
#[derive(Clone, Debug)]
pub struct Places {
    /// Directory of CDI specs, which must exist.
    pub specs: PathBuf,
    /// Executable that the spec names for hooks. None: hooks are not watched.
    pub hook: Option<PathBuf>,
    /// The agent's executable. None: the processes of containers are not watched.
    pub agent: Option<PathBuf>,
    /// Directory of containers, which may come and go; its parent must exist.
    pub containers: PathBuf,
}

impl Places {
    /// Paths of a guest.
    pub fn of_guest(agent: &Path, hook: Option<PathBuf>) -> Self {
        Self {
            specs: crate::cdi::publish::DIRECTORY.into(),
            hook,
            agent: Some(agent.into()),
            containers: "/run/kata-containers".into(),
        }
    }
}

/// Watches for as long as the runtime lives; must be called inside the runtime. The receiver of
/// `seen` must be read or dropped. Fails where the specs cannot be watched; any other path that
/// cannot be watched is reported by an event.
pub fn start(places: Places, seen: UnboundedSender<Seen>) -> io::Result<()> {
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
    let specs = inotify.add_watch(&places.specs, AddWatchFlags::IN_OPEN)?;
    let mut watched = HashMap::from([(specs, Place::Specs)]);
    let program = AddWatchFlags::IN_OPEN | AddWatchFlags::IN_CLOSE_NOWRITE;
    let run_directory = places.containers.parent().map(Path::to_path_buf);
    for (file, mask, place) in [
        (places.hook.clone(), program, Place::Hook),
        (places.agent.clone(), program, Place::Agent),
        (
            run_directory,
            AddWatchFlags::IN_CREATE | AddWatchFlags::IN_ONLYDIR,
            Place::Run,
        ),
    ] {
        let Some(file) = file else { continue };
        match inotify.add_watch(&file, mask) {
            Ok(descriptor) => drop(watched.insert(descriptor, place)),
            Err(errno) => {
                let error = format!(
                    "watch {}: {errno}: the agent's work there is not seen",
                    file.display()
                );
                tracing::warn!(
                    name: names::SINK, sink = "agent watch", state = "unavailable", error,
                );
            }
        }
    }
    let readiness: OwnedFd = inotify.as_fd().try_clone_to_owned()?;
    let readiness = crate::machine::sys::async_fd(readiness)?;
    let mut watch = Watch {
        inotify,
        watched,
        places,
        seen,
    };
    // Containers that exist already were reported by an earlier worker.
    watch.find_containers(false);
    tokio::spawn(run(watch, readiness));
    Ok(())
}

async fn run(mut watch: Watch, events: AsyncFd<OwnedFd>) {
    loop {
        let Ok(mut guard) = events.readable().await else {
            return;
        };
        match watch.inotify.read_events() {
            Ok(events) => events.iter().for_each(|event| watch.take(event)),
            Err(Errno::EAGAIN) => guard.clear_ready(),
            Err(Errno::EINTR) => {}
            Err(_) => return, // inotify fails for good only when its descriptor is gone
        }
    }
}

/// Purpose of a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Specs,
    Hook,
    Agent,
    /// Parent of the directory of containers.
    Run,
    Containers,
}

/// Meaning of an event of a place.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Meaning {
    Unrelated,
    Seen(Seen),
    /// The directory of containers may exist now.
    Containers,
    /// The kernel has removed a watch.
    Gone,
}

/// Interprets an event. `published`: whether there is a spec.
fn meaning(place: Place, mask: AddWatchFlags, name: Option<&str>, published: bool) -> Meaning {
    let directory = mask.contains(AddWatchFlags::IN_ISDIR);
    if mask.contains(AddWatchFlags::IN_IGNORED) {
        return Meaning::Gone;
    }
    match (place, name) {
        (Place::Specs, Some(FILE)) => Meaning::Seen(Seen::Look(Look::Spec)),
        (Place::Specs, None) if directory && !published => {
            Meaning::Seen(Seen::Look(Look::Directory))
        }
        // This init's temporary file, and the directory on the way to an existing spec.
        (Place::Specs, _) => Meaning::Unrelated,
        (Place::Hook, _) if mask.contains(AddWatchFlags::IN_OPEN) => Meaning::Seen(Seen::HookBegan),
        (Place::Hook, _) if mask.contains(AddWatchFlags::IN_CLOSE_NOWRITE) => {
            Meaning::Seen(Seen::HookEnded)
        }
        (Place::Agent, _) if mask.contains(AddWatchFlags::IN_OPEN) => {
            Meaning::Seen(Seen::InitBegan)
        }
        (Place::Agent, _) if mask.contains(AddWatchFlags::IN_CLOSE_NOWRITE) => {
            Meaning::Seen(Seen::ProgramBegan)
        }
        (Place::Hook | Place::Agent, _) => Meaning::Unrelated,
        (Place::Run, _) if directory => Meaning::Containers,
        (Place::Run, _) => Meaning::Unrelated,
        (Place::Containers, Some(name)) if directory && !OF_SANDBOX.contains(&name) => {
            let change = if mask.contains(AddWatchFlags::IN_CREATE) {
                Change::Made
            } else {
                Change::Removed
            };
            Meaning::Seen(Seen::Container {
                id: name.into(),
                change,
            })
        }
        (Place::Containers, _) => Meaning::Unrelated,
    }
}

/// Names of the directories in a directory.
fn folders(directory: &Path) -> impl Iterator<Item = String> + use<> {
    crate::machine::files::entries(directory)
        .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
        .map(|e| e.file_name().to_string_lossy().into_owned())
}

struct Watch {
    inotify: Inotify,
    watched: HashMap<WatchDescriptor, Place>,
    places: Places,
    seen: UnboundedSender<Seen>,
}

impl Watch {
    fn take(&mut self, event: &InotifyEvent) {
        if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
            tracing::warn!(name: names::SINK, sink = "agent watch", state = "overrun");
            // The directory of containers may have come with a dropped event.
            self.find_containers(true);
            return;
        }
        // The queue may still hold events of a removed watch.
        let Some(place) = self.watched.get(&event.wd) else {
            return;
        };
        let name = event.name.as_deref().map(|n| n.to_string_lossy());
        match meaning(
            *place,
            event.mask,
            name.as_deref(),
            self.places.specs.join(FILE).exists(),
        ) {
            Meaning::Unrelated => {}
            Meaning::Gone => drop(self.watched.remove(&event.wd)),
            Meaning::Containers => self.find_containers(true),
            Meaning::Seen(seen) => self.report(seen),
        }
    }

    fn report(&self, seen: Seen) {
        // Level info: looks, and the one trace that each container has. Level debug: the rest.
        match &seen {
            Seen::Look(what) => tracing::info!(name: names::AGENT_LOOK, what = %what),
            Seen::Container { id, change } => {
                let (container, what) = (id.as_str(), change.name());
                match change {
                    Change::Made => {
                        tracing::info!(name: names::AGENT_CONTAINER, container, what);
                    }
                    Change::Removed => {
                        tracing::debug!(name: names::AGENT_CONTAINER, container, what);
                    }
                }
            }
            Seen::InitBegan => tracing::debug!(name: names::AGENT_CONTAINER, what = "init began"),
            Seen::ProgramBegan => {
                tracing::debug!(name: names::AGENT_CONTAINER, what = "program began")
            }
            Seen::HookBegan => tracing::debug!(name: names::AGENT_HOOK, what = "began"),
            Seen::HookEnded => tracing::debug!(name: names::AGENT_HOOK, what = "ended"),
        }
        // Without a receiver, the events above remain.
        let _unused = self.seen.send(seen);
    }

    /// Watches the directory of containers if it exists; those in it are new ones if `reported`.
    fn find_containers(&mut self, reported: bool) {
        let mask = AddWatchFlags::IN_CREATE | AddWatchFlags::IN_DELETE | AddWatchFlags::IN_ONLYDIR;
        let Ok(descriptor) = self.inotify.add_watch(&self.places.containers, mask) else {
            return;
        };
        // A directory that is already watched has the same descriptor: its containers are known.
        if self.watched.insert(descriptor, Place::Containers).is_some() || !reported {
            return;
        }
        for id in folders(&self.places.containers).filter(|id| !OF_SANDBOX.contains(&id.as_str())) {
            self.report(Seen::Container {
                id,
                change: Change::Made,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;
    use std::fs::{self, File};
    use std::time::Duration;
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    const OPEN: AddWatchFlags = AddWatchFlags::IN_OPEN;
    const CREATE: AddWatchFlags = AddWatchFlags::IN_CREATE;
    const DIRECTORY: AddWatchFlags = AddWatchFlags::IN_ISDIR;

    #[test]
    fn a_look_is_an_open_of_the_spec_or_of_its_directory() {
        let look = |mask, name, published| meaning(Place::Specs, mask, name, published);
        assert_eq!(
            look(OPEN, Some("nvidia.yaml"), true),
            Meaning::Seen(Seen::Look(Look::Spec))
        );
        assert_eq!(
            look(OPEN | DIRECTORY, None, false),
            Meaning::Seen(Seen::Look(Look::Directory))
        );
        assert_eq!(look(OPEN | DIRECTORY, None, true), Meaning::Unrelated);
        assert_eq!(
            look(OPEN, Some("nvidia.yaml.tmp"), false),
            Meaning::Unrelated
        );
        assert_eq!(look(OPEN, None, false), Meaning::Unrelated);
        assert_eq!(look(AddWatchFlags::IN_IGNORED, None, false), Meaning::Gone);
    }

    #[test]
    fn a_hook_is_an_open_of_the_executable() {
        let hook = |mask| meaning(Place::Hook, mask, None, true);
        assert_eq!(hook(OPEN), Meaning::Seen(Seen::HookBegan));
        assert_eq!(
            hook(AddWatchFlags::IN_CLOSE_NOWRITE),
            Meaning::Seen(Seen::HookEnded)
        );
        assert_eq!(hook(AddWatchFlags::IN_DELETE_SELF), Meaning::Unrelated);
    }

    #[test]
    fn a_new_directory_is_a_container_an_open_its_process() {
        let container = |mask, name| meaning(Place::Containers, mask, name, true);
        let seen = |change| {
            Meaning::Seen(Seen::Container {
                id: "c0ffee".into(),
                change,
            })
        };
        assert_eq!(
            container(CREATE | DIRECTORY, Some("c0ffee")),
            seen(Change::Made)
        );
        assert_eq!(
            container(AddWatchFlags::IN_DELETE | DIRECTORY, Some("c0ffee")),
            seen(Change::Removed)
        );
        assert_eq!(container(CREATE, Some("file")), Meaning::Unrelated);
        assert_eq!(
            container(CREATE | DIRECTORY, Some("shared")),
            Meaning::Unrelated
        );
        assert_eq!(
            meaning(
                Place::Run,
                CREATE | DIRECTORY,
                Some("kata-containers"),
                true
            ),
            Meaning::Containers
        );
        assert_eq!(
            meaning(Place::Run, CREATE, Some("x"), true),
            Meaning::Unrelated
        );
        assert_eq!(
            meaning(Place::Agent, OPEN, None, true),
            Meaning::Seen(Seen::InitBegan)
        );
        assert_eq!(
            meaning(Place::Agent, AddWatchFlags::IN_CLOSE_NOWRITE, None, true),
            Meaning::Seen(Seen::ProgramBegan)
        );
    }

    /// A guest's places in a directory of their own.
    struct Guest {
        root: PathBuf,
        seen: UnboundedReceiver<Seen>,
    }

    impl Guest {
        fn start(name: &str) -> Self {
            let root = std::env::temp_dir()
                .join(format!("kata-gpu-init-watch-{name}-{}", std::process::id()));
            let _unused = fs::remove_dir_all(&root);
            let [specs, hook, agent, containers] =
                ["cdi", "init", "agent", "run/containers"].map(|name| root.join(name));
            for directory in [&specs, &root.join("run")] {
                fs::create_dir_all(directory).unwrap();
            }
            for file in [&hook, &agent] {
                fs::write(file, "").unwrap();
            }
            let (sender, seen) = unbounded_channel();
            start(
                Places {
                    specs,
                    hook: Some(hook),
                    agent: Some(agent),
                    containers,
                },
                sender,
            )
            .unwrap();
            Self { root, seen }
        }

        async fn next(&mut self) -> Seen {
            tokio::time::timeout(Duration::from_secs(60), self.seen.recv())
                .await
                .expect("nothing is seen")
                .unwrap()
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
        fs::write(guest.root.join("cdi/nvidia.yaml"), "{}").unwrap();
        assert_eq!(guest.next().await, Seen::Look(Look::Spec));
        drop(File::open(guest.root.join("init")).unwrap());
        assert_eq!(
            [guest.next().await, guest.next().await],
            [Seen::HookBegan, Seen::HookEnded]
        );
        let made = |id: &str| Seen::Container {
            id: id.into(),
            change: Change::Made,
        };
        // The directory of containers is made with the first container, removed, and made again.
        for id in ["pause", "work"] {
            fs::create_dir_all(guest.root.join("run/containers").join(id)).unwrap();
            assert_eq!(guest.next().await, made(id));
            fs::create_dir(guest.root.join("run/containers/second")).unwrap();
            assert_eq!(guest.next().await, made("second"));
            fs::remove_dir_all(guest.root.join("run/containers")).unwrap();
            for _ in 0..2 {
                assert!(matches!(
                    guest.next().await,
                    Seen::Container {
                        change: Change::Removed,
                        ..
                    }
                ));
            }
        }
        drop(File::open(guest.root.join("agent")).unwrap());
        assert_eq!(
            [guest.next().await, guest.next().await],
            [Seen::InitBegan, Seen::ProgramBegan]
        );
    }

    #[tokio::test]
    async fn containers_of_an_earlier_worker_are_not_news() {
        let folder = temp_dir();
        let root = folder.path();
        let [specs, containers] = ["cdi", "run/containers"].map(|name| root.join(name));
        fs::create_dir_all(&specs).unwrap();
        fs::create_dir_all(containers.join("old")).unwrap();
        let (sender, mut seen) = unbounded_channel();
        start(
            Places {
                specs,
                hook: None,
                agent: None,
                containers: containers.clone(),
            },
            sender,
        )
        .unwrap();
        fs::create_dir(containers.join("new")).unwrap();
        assert_eq!(
            seen.recv().await,
            Some(Seen::Container {
                id: "new".into(),
                change: Change::Made
            })
        );
    }

    #[test]
    fn after_an_overrun_a_new_containers_directory_is_watched() {
        let folder = temp_dir();
        let root = folder.path();
        let containers = root.join("run/containers");
        fs::create_dir_all(containers.join("c0ffee")).unwrap();
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).unwrap();
        // The kernel's overrun event names no watch; any descriptor does.
        let wd = inotify.add_watch(root, AddWatchFlags::IN_CREATE).unwrap();
        let (seen, mut all) = unbounded_channel();
        let places = Places {
            specs: root.join("cdi"),
            hook: None,
            agent: None,
            containers,
        };
        let mut watch = Watch {
            inotify,
            watched: HashMap::new(),
            places,
            seen,
        };
        let overrun = || InotifyEvent {
            wd,
            mask: AddWatchFlags::IN_Q_OVERFLOW,
            cookie: 0,
            name: None,
        };
        watch.take(&overrun());
        assert_eq!(
            all.try_recv(),
            Ok(Seen::Container {
                id: "c0ffee".into(),
                change: Change::Made
            })
        );
        watch.take(&overrun());
        assert!(all.try_recv().is_err());
    }
}
