//! Watches the directories of Kata's VMs for paths that match a pattern with one `*` (the sandbox's
//! id), as they come, are written, and go.
//!
//! Inotify watches begin at the first directory of the pattern, so that no directory has to exist
//! at the start. A watch is set before its directory is read: an entry made in between is seen
//! twice, never missed. When the kernel lost events everything is looked at again, and every
//! [`RESCAN`] where inotify is not to be had: other processes of this user can use up what the
//! kernel allows a user. Links below the `*` are not followed: a jailed VMM may write there. A
//! moved directory loses its watch, so that nothing in it is reported under the old name.

use super::inotify::Inotify;
use anyhow::{Result, bail};
use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat};
use nix::sys::inotify::{AddWatchFlags, WatchDescriptor};
use nix::sys::stat::Mode;
use std::collections::{BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

/// Time between two looks at everything where the kernel reports no changes.
const RESCAN: Duration = Duration::from_millis(if cfg!(test) { 10 } else { 2000 });

/// An absolute path with one component that stands for any name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    parts: Vec<OsString>,
    star: usize,
}

impl std::str::FromStr for Pattern {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let path = Path::new(text);
        let mut parts = Vec::new();
        for part in path.components() {
            match part {
                Component::RootDir => {}
                Component::Normal(name) => parts.push(name.to_os_string()),
                _ => bail!("{text}: want a path without . and .."),
            }
        }
        let star = parts.iter().position(|part| part == "*");
        let is_star_last = parts.iter().rposition(|part| part == "*") != star
            || star.is_none_or(|star| star + 1 == parts.len());
        match star {
            Some(star) if path.is_absolute() && !is_star_last => Ok(Self { star, parts }),
            _ => bail!(
                "{text}: want an absolute path with one * for the sandbox's id and something \
                 behind it, for example /run/vc/vm/*/clh.sock"
            ),
        }
    }
}

impl Pattern {
    /// The name that stands where the `*` is.
    fn id(&self, path: &Path) -> String {
        path.iter()
            .nth(self.star + 1)
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    }

    /// The path of this id.
    pub fn path(&self, id: &str) -> PathBuf {
        let parts = self.parts.iter().enumerate().map(|(depth, part)| {
            if depth == self.star {
                OsStr::new(id)
            } else {
                part
            }
        });
        Path::new("/").join(parts.collect::<PathBuf>())
    }

    /// Opens a path of this pattern, or a directory on the way to it. Links are followed above the
    /// `*`, where they are the administrator's (/var/run), and nowhere below.
    ///
    /// Opens name by name: systemd's RestrictSUIDSGID=, which DynamicUser= implies, answers openat2
    /// with ENOSYS.
    pub fn open(&self, path: &Path, flags: OFlag) -> nix::Result<OwnedFd> {
        const DIRECTORY: OFlag = OFlag::O_PATH
            .union(OFlag::O_DIRECTORY)
            .union(OFlag::O_CLOEXEC);
        let mut parts = path.components();
        let above: PathBuf = parts.by_ref().take(self.star + 1).collect();
        let mut dir = open(&above, DIRECTORY, Mode::empty())?;
        let last = parts.next_back().ok_or(Errno::ENOENT)?;
        let named = |part: Component| {
            if matches!(part, Component::Normal(_)) {
                Ok(())
            } else {
                Err(Errno::EINVAL)
            }
        };
        for part in parts {
            named(part)?;
            dir = openat(
                &dir,
                part.as_os_str(),
                DIRECTORY | OFlag::O_NOFOLLOW,
                Mode::empty(),
            )?;
        }
        named(last)?;
        openat(
            &dir,
            last.as_os_str(),
            flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC,
            Mode::empty(),
        )
    }

    /// Depth of a directory on the way to a match; None if it is not on the way.
    fn depth(&self, dir: &Path) -> Option<usize> {
        let mut depth = 0;
        for name in dir.iter().skip(1) {
            if !self.matches(depth, name) {
                return None;
            }
            depth += 1;
        }
        (depth < self.parts.len()).then_some(depth)
    }

    fn matches(&self, depth: usize, name: &OsStr) -> bool {
        self.parts
            .get(depth)
            .is_some_and(|part| depth == self.star || part == name)
    }
}

/// A change of a matching path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Whether the path is there, or was written (may be repeated), or is gone.
    pub there: bool,
    pub pattern: usize,
    pub id: String,
    pub path: PathBuf,
}

/// The patterns and the paths that match them now.
pub struct Watcher {
    /// None where the kernel gives no instance.
    inotify: Option<Inotify>,
    /// Some directory is not watched for want of inotify.
    rescans: bool,
    patterns: Vec<Pattern>,
    dirs: HashMap<WatchDescriptor, PathBuf>,
    there: BTreeSet<(PathBuf, usize)>,
    changes: Vec<Change>,
    /// Messages about directories that cannot be watched, each once.
    troubles: Vec<String>,
    troubled: BTreeSet<PathBuf>,
}

impl Watcher {
    pub fn new(patterns: Vec<Pattern>) -> Self {
        let mut watcher = Self {
            inotify: None,
            rescans: false,
            patterns,
            dirs: HashMap::new(),
            there: BTreeSet::new(),
            changes: Vec::new(),
            troubles: Vec::new(),
            troubled: BTreeSet::new(),
        };
        watcher.look_at_everything();
        watcher
    }

    /// Changes and problems since the last call.
    pub fn take(&mut self) -> (Vec<Change>, Vec<String>) {
        (
            std::mem::take(&mut self.changes),
            std::mem::take(&mut self.troubles),
        )
    }

    /// Waits until something changes. Safe to cancel.
    pub async fn changed(&mut self) -> Result<()> {
        while self.changes.is_empty() && self.troubles.is_empty() {
            let events = async {
                match &self.inotify {
                    Some(inotify) => inotify.events().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                events = events => for event in events? {
                    self.event(event.wd, event.mask, event.name.as_deref());
                },
                () = tokio::time::sleep(RESCAN), if self.rescans => self.look_at_everything(),
            }
        }
        Ok(())
    }

    fn event(&mut self, wd: WatchDescriptor, mask: AddWatchFlags, name: Option<&OsStr>) {
        if mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
            return self.look_at_everything();
        }
        if mask.contains(AddWatchFlags::IN_IGNORED) {
            if let Some(dir) = self.dirs.remove(&wd) {
                self.gone_below(&dir);
            }
            return;
        }
        let (Some(dir), Some(name)) = (self.dirs.get(&wd).cloned(), name) else {
            return;
        };
        let path = dir.join(name);
        if mask.intersects(AddWatchFlags::IN_DELETE | AddWatchFlags::IN_MOVED_FROM) {
            self.forget_below(&path);
            self.gone_below(&path);
        }
        // Look at removed names, too: exchanged directories are both there, each under the other's
        // name.
        for pattern in 0..self.patterns.len() {
            if let Some(depth) = self.patterns[pattern].depth(&dir)
                && self.patterns[pattern].matches(depth, name)
            {
                self.candidate(pattern, depth, &path);
            }
        }
    }

    /// Removes the watches of a directory and of all below it: a watch follows a moved directory.
    fn forget_below(&mut self, path: &Path) {
        let moved: Vec<WatchDescriptor> = self
            .dirs
            .iter()
            .filter(|(_, dir)| dir.starts_with(path))
            .map(|(wd, _)| *wd)
            .collect();
        for wd in moved {
            self.dirs.remove(&wd);
            if let Some(inotify) = &self.inotify {
                inotify.remove(wd);
            }
        }
    }

    fn look_at_everything(&mut self) {
        let before: Vec<PathBuf> = self.there.iter().map(|(path, _)| path.clone()).collect();
        for path in before {
            if path.symlink_metadata().is_err() {
                self.gone_below(&path);
            }
        }
        // Look every name up anew: moves in the meantime are unknown.
        self.forget_below(Path::new("/"));
        self.rescans = false;
        if self.inotify.is_none() {
            match Inotify::new() {
                Ok(inotify) => self.inotify = Some(inotify),
                Err(e) => {
                    self.rescans = true;
                    let cure = "raise fs.inotify.max_user_instances, or give the collector a user \
                                of its own";
                    self.trouble_once(Path::new(""), format!("{e:#}: {}; {cure}", late()));
                }
            }
        }
        self.visit(Path::new("/"));
    }

    fn gone_below(&mut self, path: &Path) {
        let gone: Vec<(PathBuf, usize)> = self
            .there
            .range((path.to_path_buf(), 0)..)
            .take_while(|(p, _)| p.starts_with(path))
            .cloned()
            .collect();
        for (path, pattern) in gone {
            self.there.remove(&(path.clone(), pattern));
            self.change(false, pattern, path);
        }
    }

    fn change(&mut self, there: bool, pattern: usize, path: PathBuf) {
        self.changes.push(Change {
            there,
            pattern,
            id: self.patterns[pattern].id(&path),
            path,
        });
    }

    /// Watches a directory and looks at its entries.
    fn visit(&mut self, dir: &Path) {
        let depths: Vec<(usize, usize)> = self
            .patterns
            .iter()
            .enumerate()
            .filter_map(|(n, pattern)| Some((n, pattern.depth(dir)?)))
            .collect();
        if depths.is_empty() || !self.watch(dir, &depths) {
            return;
        }
        for (pattern, depth) in depths {
            if depth != self.patterns[pattern].star {
                let path = dir.join(&self.patterns[pattern].parts[depth]);
                self.candidate(pattern, depth, &path);
                continue;
            }
            match std::fs::read_dir(dir) {
                Ok(entries) => {
                    for entry in entries.flatten() {
                        self.candidate(pattern, depth, &entry.path());
                    }
                }
                Err(e) => self.trouble(dir, &e),
            }
        }
    }

    fn watch(&mut self, dir: &Path, depths: &[(usize, usize)]) -> bool {
        let mut mask = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_ONLYDIR;
        // Set only in the last directory of a pattern: much is written in /run.
        if depths
            .iter()
            .any(|(pattern, depth)| depth + 1 == self.patterns[*pattern].parts.len())
        {
            mask |= AddWatchFlags::IN_CLOSE_WRITE;
        }
        let Some(inotify) = &self.inotify else {
            return true;
        };
        match inotify.add(dir, mask) {
            Ok(wd) => {
                self.dirs.insert(wd, dir.to_path_buf());
                true
            }
            Err(Errno::ENOENT | Errno::ENOTDIR) => false,
            Err(e @ Errno::ENOSPC) => {
                self.rescans = true;
                let (dir_, late) = (dir.display(), late());
                let text = format!("watch {dir_}: {e}: {late}; raise fs.inotify.max_user_watches");
                self.trouble_once(dir, text);
                true
            }
            Err(e) => {
                self.trouble(dir, &io::Error::from(e));
                false
            }
        }
    }

    fn trouble(&mut self, dir: &Path, error: &io::Error) {
        if error.kind() == io::ErrorKind::NotFound {
            return;
        }
        let cure = match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::EACCES | Errno::EPERM) => "; run as root or with CAP_DAC_OVERRIDE",
            _ => "",
        };
        let text = format!(
            "watch {}: {error}: VMs below it are ignored{cure}",
            dir.display()
        );
        self.trouble_once(dir, text);
    }

    fn trouble_once(&mut self, dir: &Path, text: String) {
        if self.troubled.insert(dir.to_path_buf()) {
            self.troubles.push(text);
        }
    }

    /// Handles a path with the right name at the right depth.
    fn candidate(&mut self, pattern: usize, depth: usize, path: &Path) {
        let last = depth + 1 == self.patterns[pattern].parts.len();
        // Follow links above the star, which are the administrator's (/var/run).
        let meta = if depth < self.patterns[pattern].star && !last {
            path.metadata()
        } else {
            path.symlink_metadata()
        };
        match meta {
            Ok(_) if last => {
                self.there.insert((path.to_path_buf(), pattern));
                self.change(true, pattern, path.to_path_buf());
            }
            Ok(meta) if meta.is_dir() => self.visit(path),
            Ok(_) => {}
            Err(e) => self.trouble(path.parent().unwrap_or(path), &e),
        }
    }
}

fn late() -> String {
    format!("VMs are looked for every {RESCAN:?} instead")
}

#[cfg(test)]
mod tests {
    use super::super::syscalls;
    use super::*;
    use kata_gpu_test_support::{HANG, TempDir, temp_dir};
    use std::fs;

    struct Watched {
        dir: TempDir,
        watcher: Watcher,
    }

    impl Watched {
        fn new(patterns: &[&str]) -> Self {
            let dir = temp_dir();
            let watcher = Self::watcher(&dir, patterns);
            Self { dir, watcher }
        }

        fn watcher(dir: &TempDir, patterns: &[&str]) -> Watcher {
            let at = |p: &&str| format!("{}/{p}", dir.path().display()).parse().unwrap();
            Watcher::new(patterns.iter().map(at).collect())
        }

        fn make(&self, path: &str) {
            let path = self.dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }

        /// Waits for `want` and returns all changes until then, as `+pattern id` and `-pattern id`.
        async fn until(&mut self, want: &str) -> Vec<String> {
            let mut seen = Vec::new();
            let watcher = &mut self.watcher;
            let found = async {
                loop {
                    watcher.changed().await.unwrap();
                    let (changes, troubles) = watcher.take();
                    assert_eq!(troubles, [""; 0]);
                    seen.extend(changes.into_iter().map(|change| {
                        let sign = if change.there { '+' } else { '-' };
                        format!("{sign}{} {}", change.pattern, change.id)
                    }));
                    if seen.iter().any(|s| s == want) {
                        return;
                    }
                }
            };
            let done = tokio::time::timeout(HANG, found).await;
            assert!(done.is_ok(), "no {want} within {HANG:?}");
            seen.dedup();
            seen
        }
    }

    #[tokio::test]
    async fn what_matches_is_seen_whenever_it_comes_and_when_it_goes() {
        let mut w = Watched::new(&["vc/vm/*/clh.sock", "kata/*/root/kata.hvsock"]);
        w.make("vc/vm/one/clh.sock");
        assert_eq!(w.until("+0 one").await, ["+0 one"]);
        w.make("vc/vm/one/other.sock");
        w.make("kata/two/root/kata.hvsock");
        w.make("kata/two/other/kata.hvsock");
        assert_eq!(w.until("+1 two").await, ["+1 two"]);
        fs::remove_file(w.dir.path().join("vc/vm/one/clh.sock")).unwrap();
        assert_eq!(w.until("-0 one").await, ["-0 one"]);
        fs::remove_dir_all(w.dir.path().join("kata")).unwrap();
        assert_eq!(w.until("-1 two").await, ["-1 two"]);
        // The root comes again, and the same VM in it.
        w.make("kata/two/root/kata.hvsock");
        assert_eq!(w.until("+1 two").await, ["+1 two"]);
    }

    #[tokio::test]
    async fn present_files_are_seen_and_so_are_written_and_moved_ones() {
        let dir = temp_dir();
        fs::create_dir_all(dir.path().join("sbs/old")).unwrap();
        fs::write(dir.path().join("sbs/old/persist.json"), "x").unwrap();
        let watcher = Watched::watcher(&dir, &["sbs/*/persist.json"]);
        let mut w = Watched { dir, watcher };
        assert_eq!(w.until("+0 old").await, ["+0 old"]);
        fs::write(w.dir.path().join("sbs/old/persist.json"), "y").unwrap();
        assert_eq!(w.until("+0 old").await, ["+0 old"]);
        w.make("elsewhere/new/persist.json");
        fs::rename(
            w.dir.path().join("elsewhere/new"),
            w.dir.path().join("sbs/new"),
        )
        .unwrap();
        assert_eq!(w.until("+0 new").await, ["+0 new"]);
    }

    #[tokio::test]
    async fn a_link_below_the_star_is_not_followed() {
        let mut w = Watched::new(&["kata/*/root/kata.hvsock"]);
        w.make("elsewhere/kata.hvsock");
        fs::create_dir_all(w.dir.path().join("kata/evil")).unwrap();
        std::os::unix::fs::symlink(
            w.dir.path().join("elsewhere"),
            w.dir.path().join("kata/evil/root"),
        )
        .unwrap();
        std::os::unix::fs::symlink(
            w.dir.path().join("kata/evil"),
            w.dir.path().join("kata/worse"),
        )
        .unwrap();
        w.make("kata/good/root/kata.hvsock");
        assert_eq!(w.until("+0 good").await, ["+0 good"]);
    }

    #[tokio::test]
    async fn a_moved_socket_is_reported_under_its_new_name_alone() {
        let mut w = Watched::new(&["kata/*/root/kata.hvsock"]);
        w.make("kata/one/root/kata.hvsock");
        assert_eq!(w.until("+0 one").await, ["+0 one"]);
        let [one, two, three, away] =
            ["kata/one", "kata/two", "kata/three", "away"].map(|path| w.dir.path().join(path));
        fs::rename(&one, &two).unwrap();
        assert_eq!(w.until("+0 two").await, ["-0 one", "+0 two"]);
        // Move the VM out of sight, where it goes on; another VM takes its name.
        fs::rename(&two, &away).unwrap();
        assert_eq!(w.until("-0 two").await, ["-0 two"]);
        w.make("kata/two/root/kata.hvsock");
        assert_eq!(w.until("+0 two").await, ["+0 two"]);
        fs::remove_file(away.join("root/kata.hvsock")).unwrap();
        w.make("kata/three/root/kata.hvsock");
        assert_eq!(
            w.until("+0 three").await,
            ["+0 three"],
            "what goes out of sight takes no name away"
        );
        // Exchange the two: both are there, and both names are reported again.
        nix::fcntl::renameat2(
            nix::fcntl::AT_FDCWD,
            &two,
            nix::fcntl::AT_FDCWD,
            &three,
            nix::fcntl::RenameFlags::RENAME_EXCHANGE,
        )
        .unwrap();
        w.make("kata/last/root/kata.hvsock");
        let seen = w.until("+0 last").await;
        for id in ["two", "three"] {
            let (gone, there) = (format!("-0 {id}"), format!("+0 {id}"));
            let last = |what: &str| {
                seen.iter()
                    .rposition(|s| s == what)
                    .unwrap_or_else(|| panic!("no {what}: {seen:?}"))
            };
            assert!(last(&gone) < last(&there), "{seen:?}");
        }
    }

    #[test]
    fn without_inotify_what_matches_is_seen_late_and_the_log_has_the_cure() {
        // A thread of its own: the filter stays.
        let look = || {
            syscalls::answer_unknown(nix::libc::SYS_inotify_init1).unwrap();
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = runtime.enable_all().build().unwrap();
            runtime.block_on(async {
                let mut w = Watched::new(&["vm/*/clh.sock"]);
                let (_, troubles) = w.watcher.take();
                assert!(
                    troubles.len() == 1 && troubles[0].contains("fs.inotify.max_user_instances"),
                    "{troubles:?}"
                );
                w.make("vm/one/clh.sock");
                assert_eq!(w.until("+0 one").await, ["+0 one"]);
                fs::remove_dir_all(w.dir.path().join("vm")).unwrap();
                w.make("vm/two/clh.sock");
                assert!(w.until("+0 two").await.contains(&"-0 one".to_string()));
            });
        };
        std::thread::scope(|scope| scope.spawn(look).join().unwrap());
    }

    #[tokio::test]
    async fn many_at_once_are_all_seen() {
        let mut w = Watched::new(&["vm/*/clh.sock"]);
        for n in 0..500 {
            w.make(&format!("vm/{n}/clh.sock"));
        }
        let mut seen = w.until("+0 499").await;
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 500);
        fs::remove_dir_all(w.dir.path().join("vm")).unwrap();
        w.until("-0 0").await;
    }

    #[test]
    fn a_wrong_pattern_is_refused_with_an_example() {
        for text in ["run/*/x", "/run/x", "/run/*/*/x", "/run/*", "", "*"] {
            let error = text.parse::<Pattern>().unwrap_err().to_string();
            assert!(error.contains("for example /run/vc/vm"), "{text}: {error}");
        }
        assert!("/run/../*/x".parse::<Pattern>().is_err());
        assert!("/run/vc/vm/*/clh.sock".parse::<Pattern>().is_ok());
    }
}
