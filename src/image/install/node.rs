//! `install --node`, on a node of a cluster: copies the initrd or image there, installs the copy,
//! and with `--repeat` installs it again whenever an upgrade of Kata has removed it. With
//! `--remove` it removes all of it.
//!
//! A copy's name contains its content's hash, so a new copy never replaces the file of a pod that
//! is starting. The former copy stays for such pods and for rollback. The end of a `--repeat`
//! process changes nothing: across a reboot of the node and an upgrade of the DaemonSet, GPU pods
//! start as before. Only `--remove` removes it.
//! Not here: content of the drop-in, see the rest of [`super`].

use super::gpu_pods::Node;
use super::here::{Args, Report, say_here};
use crate::doing::Doing;
use crate::images::disk_image::hash_tree;
use crate::images::image::{self, Content, Form, open_regular};
use crate::images::output_file::{Output, PARTIAL};
use crate::kata::refusal::Refusal;
use crate::kata::version::Configured;
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_report::data::text::hex;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::timeout;

/// Digits of the SHA-256 in a copy's name, and the mark before them.
const DIGITS: usize = 12;
const MARK: &str = "-sha256-";
/// File in the folder that names the configuration whose copies are there.
const OWNER: &str = ".configuration";
/// Interval between checks of the files that guests start from: Kata's own upgrade replaces files
/// on a node without notice.
const LOOK: Duration = Duration::from_secs(10);
/// A copy of a guest on the node.
struct Copied {
    path: PathBuf,
    /// Whether this install made the copy.
    made: bool,
}

/// Name of the copy: the source's name with the hash before the extension.
fn name_of(source: &Path, hash: &str) -> Option<String> {
    let stem = source.file_stem()?.to_str()?;
    let digits = hash.get(..DIGITS)?;
    Some(match source.extension() {
        Some(extension) => format!("{stem}{MARK}{digits}.{}", extension.to_str()?),
        None => format!("{stem}{MARK}{digits}"),
    })
}

/// Whether [`name_of`] gives such a name for any source; includes interrupted copies.
fn is_copy(name: &str) -> bool {
    let name = name.strip_suffix(PARTIAL).unwrap_or(name);
    let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
    let hash = stem.rsplit_once(MARK).map_or("", |(_, hash)| hash);
    hash.len() == DIGITS
        && hash
            .bytes()
            .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// Makes the folder and claims it for this configuration.
fn claim(dir: &Path, config: &Path) -> Result<PathBuf> {
    let config = fs::canonicalize(config).doing("look for", config)?;
    fs::create_dir_all(dir).doing("make", dir)?;
    let dir = fs::canonicalize(dir).doing("look for", dir)?;
    let (owner, text) = (dir.join(OWNER), format!("{}\n", config.display()));
    match fs::read_to_string(&owner) {
        Ok(there) if there == text => {}
        Ok(there) => bail!(
            "{} is the folder of {}: name another one with --node",
            dir.display(),
            there.trim()
        ),
        Err(e) if e.kind() == ErrorKind::NotFound => {
            fs::write(&owner, text).doing("write", &owner)?;
        }
        Err(e) => return Err(e).doing("read", &owner),
    }
    Ok(dir)
}

fn copy(source: &Path, dir: &Path) -> Result<Copied> {
    let open = |path: &Path| open_regular(path).and_then(Content::of_file);
    let content = open(source).doing("open", source)?;
    let hash = content.sha256().doing("read", source)?;
    let name = name_of(source, &hex(&hash))
        .with_context(|| format!("{}: its name is not UTF-8: rename it", source.display()))?;
    let path = dir.join(name);
    if open(&path)
        .and_then(|there| there.sha256())
        .is_ok_and(|there| there == hash)
    {
        return Ok(Copied { path, made: false });
    }
    let mut output = Output::create(&path, Form::Plain)?;
    image::copy(&content, &mut output)
        .with_context(|| format!("copy {} to {}", source.display(), dir.display()))?;
    let mut written = output.end()?;
    ensure!(
        written.sha256 == hex(&hash),
        "{}: changed while it was copied: run it again",
        source.display()
    );
    written.keep()?;
    Ok(Copied { path, made: true })
}

/// Removes all copies except `keep`.
fn remove_copies(dir: &Path, keep: &[PathBuf]) -> Result<()> {
    for entry in fs::read_dir(dir).doing("read", dir)? {
        let path = entry.doing("read", dir)?.path();
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        if is_copy(name)
            && !keep.contains(&path)
            && path.symlink_metadata().is_ok_and(|meta| meta.is_file())
        {
            fs::remove_file(&path).doing("remove", &path)?;
        }
    }
    Ok(())
}

/// File that guests of the configuration start from now.
fn installed(config: &Path) -> Option<PathBuf> {
    let of = Configured::read(config).ok()?;
    let now = of.now();
    let text = |key| now.text(&of.key(key));
    text("initrd").or_else(|| text("image")).map(PathBuf::from)
}

/// `install --node`: installs, and returns the output.
pub fn say(args: &Args, dir: &Path) -> Report {
    let refused = |refusal: Refusal| {
        Report::refused(format!(
            "refused: {refusal}\nnothing was written, for 1 reason\n"
        ))
    };
    if args.dry_run {
        let why = "does not apply to a copy that does not exist yet";
        return refused(
            Refusal::of_argument("--dry-run", why).cure("omit --node: the rest is the same"),
        );
    }
    if !args.unset.is_empty() {
        let why =
            "is not for a node: an installation there has the parameters of --param and no others";
        return refused(Refusal::of_argument("--unset", why).cure("omit it"));
    }
    let Some(source) = args.initrd.as_ref().or(args.image.as_ref()) else {
        return refused(
            Refusal::of_argument("--node", "needs --initrd or --image")
                .cure("name the file that is copied"),
        );
    };
    // Check the source before writing a copy of its size.
    let checked = say_here(&Args {
        dry_run: true,
        ..args.clone()
    });
    if checked.code != 0 {
        return checked;
    }
    let former = installed(&args.kata_config);
    let copied = match claim(dir, &args.kata_config).and_then(|dir| copy(source, &dir)) {
        Ok(copied) => copied,
        Err(error) => return Report::failed(&error),
    };
    let mut of_copy = args.clone();
    of_copy.initrd = args.initrd.as_ref().map(|_| copied.path.clone());
    of_copy.image = args.image.as_ref().map(|_| copied.path.clone());
    if let (Some(image), None) = (&args.image, &args.verity) {
        // The file with the parameters stays beside the source.
        of_copy.verity = match hash_tree::beside(image) {
            Ok(verity) => verity,
            Err(error) => return Report::failed(&error),
        };
    }
    let mut said = say_here(&of_copy);
    if said.code != 0 {
        // Nothing uses the copy; a failure to remove it is harmless.
        let _unused = copied.made.then(|| fs::remove_file(&copied.path));
        return said;
    }
    let keep: Vec<PathBuf> = [Some(copied.path.clone()), former.clone()]
        .into_iter()
        .flatten()
        .collect();
    // A repeated install does not know the former copy: keep all copies.
    let removed = if former.as_ref() == Some(&copied.path) {
        Ok(())
    } else {
        remove_copies(dir, &keep)
    };
    let labelled = removed.and_then(|()| args.place.node_feature.as_deref().map_or(Ok(()), label));
    said.add(labelled);
    said
}

fn label(file: &Path) -> Result<()> {
    let name = file
        .file_name()
        .and_then(|name| name.to_str())
        .with_context(|| format!("{}: no name of a file", file.display()))?;
    let dir = file.parent().context("a file in a folder")?;
    fs::create_dir_all(dir).doing("make", dir)?;
    let text = format!("{name}=true\n");
    // The time of an unchanged file stays: `repeat` installs again after each change.
    if fs::read_to_string(file).is_ok_and(|there| there == text) {
        return Ok(());
    }
    // Write in place: Node Feature Discovery polls the file and finds a missing line at its next
    // poll.
    fs::write(file, text).doing("write", file)
}

/// Removes a file that may be gone already.
fn remove(file: &Path) -> Result<()> {
    match fs::remove_file(file) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(e).doing("remove", file),
        _ => Ok(()),
    }
}

/// Removes everything that `install --node` put on the node. The label goes first: no more pods
/// that ask for the label are scheduled here.
pub fn remove_all(args: &Args) -> Report {
    let unlabelled = args.place.node_feature.as_deref().map_or(Ok(()), remove);
    let mut said = super::remove::say_here(args);
    said.add(unlabelled);
    if let Some(dir) = args
        .place
        .node
        .as_deref()
        .filter(|dir| said.code == 0 && dir.exists())
    {
        said.add(empty(dir, &args.kata_config));
    }
    said
}

/// Removes the copies, and the folder if nothing else is in it.
fn empty(dir: &Path, config: &Path) -> Result<()> {
    // Kata's own uninstall may have removed the configuration already.
    let dir = if config.exists() {
        claim(dir, config)?
    } else {
        dir.to_path_buf()
    };
    remove_copies(&dir, &[])?;
    remove(&dir.join(OWNER))?;
    match fs::remove_dir(&dir) {
        Err(e) if e.kind() != ErrorKind::DirectoryNotEmpty => Err(e).doing("remove", &dir),
        _ => Ok(()),
    }
}

/// Files of an installation, each with its identity and time, which differ after every change.
type Stamps = Vec<(PathBuf, Option<(u64, SystemTime)>)>;

fn stamps(args: &Args) -> Stamps {
    let mut paths = vec![args.kata_config.clone()];
    if let Ok(of) = Configured::read(&args.kata_config) {
        let now = of.now();
        let value = |key| now.text(&of.key(key)).map(PathBuf::from);
        paths.push(of.config.drop_in_path());
        paths.extend(of.config.others.iter().map(|source| source.path.clone()));
        paths.extend(["kernel", "initrd", "image"].into_iter().filter_map(value));
    }
    paths.extend(args.initrd.iter().chain(&args.image).cloned());
    paths.extend(args.image.as_deref().map(hash_tree::file_of));
    paths.extend(args.place.node_feature.clone());
    let stamp = |path: &Path| {
        let meta = fs::metadata(path).ok()?;
        Some((meta.ino(), meta.modified().ok()?))
    };
    paths
        .into_iter()
        .map(|path| (path.clone(), stamp(&path)))
        .collect()
}

/// `install --node --repeat`: installs, or removes, and again after every change, until SIGTERM.
/// `look` reads the facts about the node.
pub fn repeat(
    args: &Args,
    look: impl Fn() -> Node,
    say: impl Fn(&Args) -> Report,
) -> Result<ExitCode> {
    let mut args = args.clone();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    runtime.block_on(async {
        let mut end = signal(SignalKind::terminate()).context("wait for SIGTERM")?;
        let (mut seen, mut last) = (None, Report::default());
        loop {
            // Take stamps before the install: a change during the install is seen at the next look.
            let now = stamps(&args);
            let is_changed = seen.as_ref() != Some(&now);
            // A refused install is tried at each look, and boots are many files.
            if is_changed {
                args.seen = look();
            }
            if last.code != 0 || is_changed {
                let said = say(&args);
                if said.code != 0 {
                    args.place.node_feature.as_deref().map_or(Ok(()), remove)?;
                }
                // Print an unchanged refusal once.
                if said.code == 0 || said != last {
                    said.clone().print();
                }
                last = said;
            }
            seen = Some(now);
            if timeout(LOOK, end.recv()).await.is_ok() {
                return Ok(ExitCode::SUCCESS);
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;

    #[test]
    fn a_copys_name_has_its_hash_and_is_known_again() {
        let hash = "9772975692f6dbb507cdd0e9bba57cdf14a6bf7f598583336a45394c6dfa4327";
        let named = [
            ("/gpu.initrd", "gpu-sha256-9772975692f6.initrd"),
            ("a/b", "b-sha256-9772975692f6"),
        ];
        for (source, name) in named
            .into_iter()
            .chain([("x.y.img", "x.y-sha256-9772975692f6.img")])
        {
            assert_eq!(name_of(Path::new(source), hash).as_deref(), Some(name));
            assert!(
                is_copy(name) && is_copy(&format!("{name}{PARTIAL}")),
                "{name}"
            );
        }
        let others = [
            "gpu.initrd",
            "gpu-sha256-977297569.initrd",
            "gpu-sha256-9772975692fX.initrd",
            OWNER,
        ];
        for other in others
            .into_iter()
            .chain(["backup-202611230826.tar", "gpu-sha256-9772975692f6.img.new"])
        {
            assert!(!is_copy(other), "{other}");
        }
    }

    #[test]
    fn a_copy_is_made_once_and_made_anew_where_it_is_damaged() {
        let dir = temp_dir();
        let (source, config) = (
            dir.path().join("gpu.initrd"),
            dir.path().join("configuration.toml"),
        );
        fs::write(&source, b"one").unwrap();
        fs::write(&config, b"").unwrap();
        let to = claim(&dir.path().join("node/deeper"), &config).unwrap();
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
        assert!(
            copy(dir.path(), &to).is_err_and(|e| format!("{e:#}").contains("not a regular file"))
        );
    }

    #[test]
    fn a_folder_is_one_configurations_alone() {
        let dir = temp_dir();
        let (one, other, to) = (
            dir.path().join("one.toml"),
            dir.path().join("other.toml"),
            dir.path().join("node"),
        );
        fs::write(&one, b"").unwrap();
        fs::write(&other, b"").unwrap();
        claim(&to, &one).unwrap();
        assert!(claim(&to, &one).is_ok());
        assert!(claim(&to, &other).is_err_and(|e| e.to_string().contains("is the folder of ")));
        assert!(empty(&to, &other).is_err());
        empty(&to, &one).unwrap();
        assert!(!to.exists());
    }
}
