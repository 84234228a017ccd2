//! `install --node`, on a node of a cluster: copies the initrd or image there, installs the copy, and
//! with `--stay` keeps it installed until the pod that it runs in is removed.
//!
//! A copy's name has its content's hash, so that a new one never takes the place of one that a pod
//! which starts just now is given; the former one stays for such pods and for the way back. Two
//! processes that stay are two versions of a DaemonSet's pod in an upgrade: the first to end leaves
//! everything to the other, the last one uninstalls.
//! Not here: what is written into a configuration, see the rest of [`super`].

use super::kata_config::KataConfig;
use super::merge::Effective;
use super::refusal::Refusal;
use super::{Args, Said, plan, uninstall, version, with_ours};
use crate::host::initrd::image::Form;
use crate::host::initrd::output::Output;
use crate::host::initrd::text::hex;
use crate::host::text::printable;
use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::SignalFd;
use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

/// Digits of the SHA-256 in a copy's name.
const DIGITS: usize = 12;
const CHUNK: usize = 1 << 20;
/// File whose lock says that a process stays.
const HOLDERS: &str = ".holders";
/// Time between two looks at what a configuration's guests start from: Kata's own upgrade replaces
/// the files on a node and announces it to nobody there.
const LOOK_MS: u16 = 10_000;

/// Where an install on a node puts things.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Place {
    /// On a node of a cluster: copy the initrd or image to this folder, under a name with its hash, and
    /// install the copy. The former copy stays there, older ones are removed.
    #[arg(long = "node", value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Make this file of Node Feature Discovery while it is installed: the node gets the label
    /// feature.node.kubernetes.io/NAME=true, NAME being the file's.
    #[arg(long, value_name = "FILE", requires = "dir")]
    pub node_feature: Option<PathBuf>,
}

/// A copy of a guest on the node.
struct Copied {
    path: PathBuf,
    /// Whether it was not there before.
    made: bool,
}

/// Name of the copy of `source`: its own, with the hash before the extension.
fn name_of(source: &Path, hash: &str) -> Option<String> {
    let stem = source.file_stem()?.to_str()?;
    let digits = hash.get(..DIGITS)?;
    Some(match source.extension() {
        Some(extension) => format!("{stem}-{digits}.{}", extension.to_str()?),
        None => format!("{stem}-{digits}"),
    })
}

/// Whether a name is one that [`name_of`] gives, of whichever source.
fn is_copy(name: &str) -> bool {
    let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
    let hash = stem.rsplit_once('-').map_or("", |(_, hash)| hash);
    hash.len() == DIGITS && hash.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

fn hash_of(file: &mut File) -> std::io::Result<String> {
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; CHUNK]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex(&hash.finalize())),
            read => hash.update(buffer.get(..read).unwrap_or_default()),
        }
    }
}

fn copy(source: &Path, dir: &Path) -> Result<Copied> {
    fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
    let dir = fs::canonicalize(dir).with_context(|| format!("look for {}", dir.display()))?;
    let mut file = File::open(source).with_context(|| format!("open {}", source.display()))?;
    ensure!(file.metadata()?.is_file(), "{}: is no regular file", source.display());
    let hash = hash_of(&mut file).with_context(|| format!("read {}", source.display()))?;
    let name = name_of(source, &hash).with_context(|| format!("{}: its name is not UTF-8: rename it", source.display()))?;
    let path = dir.join(name);
    if let Ok(mut there) = File::open(&path)
        && hash_of(&mut there).is_ok_and(|there| there == hash)
    {
        return Ok(Copied { path, made: false });
    }
    let mut output = Output::create(&path, Form::Plain)?;
    let mut again = File::open(source).with_context(|| format!("open {}", source.display()))?;
    std::io::copy(&mut again, &mut output).with_context(|| format!("copy {} to {}", source.display(), dir.display()))?;
    let mut written = output.end()?;
    ensure!(written.sha256 == hash, "{}: changed while it was copied: run it again", source.display());
    written.keep()?;
    Ok(Copied { path, made: true })
}

/// Removes the copies that are none of these.
fn remove_copies(dir: &Path, keep: &[PathBuf]) -> Result<()> {
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries.with_context(|| format!("read {}", dir.display()))?,
    };
    for entry in entries {
        let path = entry.with_context(|| format!("read {}", dir.display()))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if is_copy(name) && !keep.contains(&path) && path.symlink_metadata().is_ok_and(|meta| meta.is_file()) {
            fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
        }
    }
    Ok(())
}

/// A configuration as it is now, and its section.
fn effective(config: &Path) -> Option<(KataConfig, Effective, String)> {
    let config = KataConfig::read(config).ok()?;
    let (runtime, section) = version::runtime_and_section(&config).ok()?;
    let effective = with_ours(&config, runtime, config.ours.text());
    Some((config, effective, section))
}

/// File that guests of the configuration start from now.
fn installed(config: &Path) -> Option<PathBuf> {
    let (_, now, section) = effective(config)?;
    let text = |key| plan::text(&now, &section, key).filter(|path| !path.is_empty());
    text("initrd").or_else(|| text("image")).map(PathBuf::from)
}

/// `install --node`: what it does, and says.
pub fn say(args: &Args, dir: &Path) -> Said {
    let refused = |refusal: Refusal| Said::refused(format!("refused: {refusal}\nnothing was written, for 1 reason\n"));
    if args.dry_run {
        let why = "says nothing of a copy that is not there yet";
        return refused(Refusal::of_argument("--dry-run", why).cure("leave --node away: the rest is the same"));
    }
    let Some(source) = args.initrd.as_ref().or(args.image.as_ref()) else {
        return refused(Refusal::of_argument("--node", "needs --initrd or --image").cure("name the file that is copied"));
    };
    let former = installed(&args.kata_config);
    let copied = match copy(source, dir) {
        Ok(copied) => copied,
        Err(error) => return refused(Refusal::at(source, format!("{error:#}"))),
    };
    let mut of_copy = args.clone();
    of_copy.initrd = args.initrd.as_ref().map(|_| copied.path.clone());
    of_copy.image = args.image.as_ref().map(|_| copied.path.clone());
    let mut said = super::say_here(&of_copy);
    if said.code != 0 {
        // It serves nobody; that it stays where it cannot be removed hurts nobody either.
        let _unused = copied.made.then(|| fs::remove_file(&copied.path));
        return said;
    }
    let keep = [Some(copied.path.clone()), former.clone()].into_iter().flatten().collect::<Vec<_>>();
    // Installed again, it has no former one to tell: then all stay.
    let removed = if former.as_ref() == Some(&copied.path) { Ok(()) } else { remove_copies(dir, &keep) };
    let labelled = removed.and_then(|()| args.place.node_feature.as_deref().map_or(Ok(()), label));
    if let Err(error) = labelled {
        said.err.push_str(&format!("kata-gpu-boot: {}\n", printable(&format!("{error:#}"))));
        said.code = 1;
    }
    said
}

fn label(file: &Path) -> Result<()> {
    let name = file.file_name().and_then(|name| name.to_str()).with_context(|| format!("{}: no name of a file", file.display()))?;
    let dir = file.parent().context("a file in a folder")?;
    fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
    // Node Feature Discovery reads it now and then: a line that is not there yet is one that comes at its next look.
    fs::write(file, format!("{name}=true\n")).with_context(|| format!("write {}", file.display()))
}

fn remove_label(file: &Path) -> Result<()> {
    match fs::remove_file(file) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(e).with_context(|| format!("remove {}", file.display())),
        _ => Ok(()),
    }
}

/// Takes away what `install --node` has put on the node. The label goes first: pods that ask for it
/// are not sent here any more.
pub fn uninstall(args: &uninstall::Args, place: &Place) -> Said {
    let unlabelled = place.node_feature.as_deref().map_or(Ok(()), remove_label);
    let mut said = uninstall::say_here(args);
    let copies = match &place.dir {
        Some(dir) if said.code == 0 => remove_copies(dir, &[]),
        _ => Ok(()),
    };
    for error in [unlabelled, copies].into_iter().filter_map(Result::err) {
        said.err.push_str(&format!("kata-gpu-boot: {}\n", printable(&format!("{error:#}"))));
        said.code = 1;
    }
    said
}

/// A process that stays.
struct Holder {
    held: Flock<File>,
}

impl Holder {
    /// Waits for one that uninstalls just now.
    fn take(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
        let path = dir.join(HOLDERS);
        let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
        let file = file.with_context(|| format!("open {}", path.display()))?;
        let held = Flock::lock(file, FlockArg::LockShared).map_err(|(_, e)| e).with_context(|| format!("lock {}", path.display()))?;
        Ok(Self { held })
    }

    /// Whether no other one stays; if so, none comes until this value is dropped.
    fn is_last(&self) -> Result<bool> {
        match self.held.relock(FlockArg::LockExclusiveNonblock) {
            Ok(()) => Ok(true),
            Err(Errno::EWOULDBLOCK) => Ok(false),
            Err(e) => Err(e).context("lock it for oneself"),
        }
    }
}

/// What shows that a file is another one or has changed.
type Stamp = Option<(u64, u64, u64, SystemTime)>;

fn stamp(path: &Path) -> Stamp {
    let meta = fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino(), meta.len(), meta.modified().ok()?))
}

/// The files that an install looks at, each with its stamp.
fn stamps(args: &Args) -> Vec<(PathBuf, Stamp)> {
    let mut paths = vec![args.kata_config.clone()];
    if let Some((config, now, section)) = effective(&args.kata_config) {
        paths.push(config.drop_in_path());
        paths.extend(config.others.iter().map(|source| source.path.clone()));
        paths.extend(["kernel", "initrd", "image"].iter().filter_map(|key| plan::text(&now, &section, key)).map(PathBuf::from));
    }
    paths.into_iter().map(|path| (path.clone(), stamp(&path))).collect()
}

/// `install --node --stay`: installs, again whenever something has changed, and uninstalls at
/// SIGTERM or SIGINT.
pub fn stay(args: &Args, dir: &Path) -> ExitCode {
    match staying(args, dir) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("kata-gpu-boot: {}", printable(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

fn staying(args: &Args, dir: &Path) -> Result<ExitCode> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    // Before anything is written: one that comes from now on is answered by the end of the loop.
    signals.thread_block().context("block SIGTERM")?;
    let end = SignalFd::new(&signals).context("wait for SIGTERM")?;
    let holder = Holder::take(dir)?;
    let mut seen = None;
    let mut last_refusal = String::new();
    loop {
        let now = stamps(args);
        if seen.as_ref() != Some(&now) {
            let said = say(args, dir);
            // What was refused is tried again: Kata may be installed just now. It is said once.
            seen = (said.code == 0).then(|| stamps(args));
            if said.code != 0 {
                args.place.node_feature.as_deref().map_or(Ok(()), remove_label)?;
            }
            if said.code == 0 || said.err != last_refusal {
                last_refusal = said.err.clone();
                said.print();
            }
        }
        let mut fds = [PollFd::new(end.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::from(LOOK_MS)) {
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => break,
            Err(e) => return Err(e).context("wait for SIGTERM"),
        }
    }
    if !holder.is_last()? {
        println!("another pod of this node keeps it installed");
        return Ok(ExitCode::SUCCESS);
    }
    Ok(uninstall(&uninstall::Args::of(&args.kata_config), &Place { dir: Some(dir.into()), ..args.place.clone() }).print())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::TempDir;

    #[test]
    fn a_copys_name_has_its_hash_and_is_known_again() {
        let hash = "9772975692f6dbb507cdd0e9bba57cdf14a6bf7f598583336a45394c6dfa4327";
        for (source, name) in [("/gpu.initrd", "gpu-9772975692f6.initrd"), ("a/b", "b-9772975692f6"), ("x.y.img", "x.y-9772975692f6.img")] {
            assert_eq!(name_of(Path::new(source), hash).as_deref(), Some(name));
            assert!(is_copy(name), "{name}");
        }
        for other in
            ["gpu.initrd", "gpu-977297569.initrd", "gpu-9772975692fX.initrd", ".holders", "9772975692f6", "gpu-9772975692f6.img.new"]
        {
            assert!(!is_copy(other) || other.ends_with(".new"), "{other}");
        }
    }

    #[test]
    fn a_copy_is_made_once_and_made_anew_where_it_is_damaged() {
        let dir = TempDir::new();
        let (source, to) = (dir.path().join("gpu.initrd"), dir.path().join("node/deeper"));
        fs::write(&source, b"one").unwrap();
        let first = copy(&source, &to).unwrap();
        assert!(first.made && !copy(&source, &to).unwrap().made);
        fs::write(&first.path, b"tw").unwrap();
        assert!(copy(&source, &to).unwrap().made);
        assert_eq!(fs::read(&first.path).unwrap(), b"one");
        fs::write(&source, b"two").unwrap();
        let second = copy(&source, &to).unwrap();
        fs::write(to.join("kept"), b"").unwrap();
        remove_copies(&to, std::slice::from_ref(&second.path)).unwrap();
        assert!(second.path.exists() && !first.path.exists() && to.join("kept").exists());
        assert!(copy(dir.path(), &to).is_err_and(|e| e.to_string().contains("no regular file")));
    }

    #[test]
    fn the_last_of_those_that_stay_knows_it() {
        let dir = TempDir::new();
        let (first, second) = (Holder::take(dir.path()).unwrap(), Holder::take(dir.path()).unwrap());
        assert!(!first.is_last().unwrap());
        drop(first);
        assert!(second.is_last().unwrap());
    }
}
