//! Directory trees that stand for containers, and the hooks run on them.

use crate::{TempDir, write};
use kata_gpu_init::cdi::hooks::{self, Outcome};
use kata_gpu_init::formats::ld_so_cache;
use kata_gpu_init::formats::ld_so_cache::Cache;
use kata_gpu_test_support::elf_stand_in as stand_in;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

pub const LIBS: &str = "/usr/lib/x86_64-linux-gnu";

pub const DRIVER: &str = "550.163.01";

/// A bundle with a container's root, and something beside it that no hook may touch.
pub struct Container {
    pub dir: TempDir,
}

impl Container {
    /// An empty root.
    pub fn new(test: &str) -> Self {
        let dir = TempDir::new(&format!("hooks-{test}"));
        for path in ["bundle/rootfs", "outside/etc"] {
            crate::make_dir(dir.0.join(path));
        }
        write(dir.0.join("outside/etc/ld.so.cache"), "the guest's own");
        write(dir.0.join("outside/secret"), "secret");
        let container = Self { dir };
        container.config(
            &serde_json::json!({ "ociVersion": "1.0.2", "root": { "path": container.path("") } })
                .to_string(),
        );
        container
    }

    /// A small Debian, with a driver's libraries as a runtime mounts them, and without links to
    /// them.
    pub fn debian(test: &str) -> Self {
        let container = Self::new(test);
        container.file("/etc/debian_version", b"12.8\n");
        container.file("/etc/ld.so.conf", b"include /etc/ld.so.conf.d/*.conf\n\n");
        container.file(
            "/etc/ld.so.conf.d/libc.conf",
            b"# libc default configuration\n/usr/local/lib\n",
        );
        container.file(
            "/etc/ld.so.conf.d/x86_64-linux-gnu.conf",
            b"# Multiarch\n/usr/local/lib/x86_64-linux-gnu\n/lib/x86_64-linux-gnu\n\
                /usr/lib/x86_64-linux-gnu\n",
        );
        container.directory("/usr/lib64");
        container.directory("/usr/local/lib");
        container.link("/lib", "usr/lib");
        container.link("/lib64", "usr/lib64");
        container.library(&format!("{LIBS}/libc.so.6"), Some("libc.so.6"));
        container.library(
            &format!("{LIBS}/ld-linux-x86-64.so.2"),
            Some("ld-linux-x86-64.so.2"),
        );
        container.link(
            "/usr/lib64/ld-linux-x86-64.so.2",
            "/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
        );
        container.driver(LIBS);
        container
    }

    pub fn driver(&self, folder: &str) {
        for name in ["libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"] {
            self.library(
                &format!("{folder}/{name}.so.{DRIVER}"),
                Some(&format!("{name}.so.1")),
            );
        }
    }

    /// Path on this machine of a path in the container.
    pub fn path(&self, path: &str) -> PathBuf {
        self.dir
            .0
            .join("bundle/rootfs")
            .join(path.trim_start_matches('/'))
    }

    pub fn outside(&self) -> PathBuf {
        self.dir.0.join("outside")
    }

    pub fn config(&self, text: &str) {
        write(self.dir.0.join("bundle/config.json"), text);
    }

    fn parent(&self, path: &str) -> PathBuf {
        let path = self.path(path);
        crate::make_dir(path.parent().unwrap());
        path
    }

    pub fn directory(&self, path: &str) {
        crate::make_dir(self.path(path));
    }

    pub fn file(&self, path: &str, content: &[u8]) {
        write(self.parent(path), content);
    }

    pub fn library(&self, path: &str, soname: Option<&str>) {
        self.file(path, &stand_in::library(soname, &["libc.so.6"]));
    }

    pub fn link(&self, path: &str, target: impl AsRef<Path>) {
        crate::link(target, self.parent(path));
    }

    pub fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.path(path)).ok()
    }

    pub fn target(&self, path: &str) -> Option<String> {
        fs::read_link(self.path(path))
            .ok()
            .map(|t| t.to_str().unwrap().to_string())
    }

    /// Fails unless the file has this text.
    #[track_caller]
    pub fn has(&self, path: &str, text: &str) {
        assert_eq!(self.read(path).as_deref(), Some(text), "{path}");
    }

    /// Fails unless the link below [`LIBS`] leads there.
    #[track_caller]
    pub fn leads(&self, link: &str, target: &str) {
        assert_eq!(
            self.target(&format!("{LIBS}/{link}")).as_deref(),
            Some(target),
            "{link}"
        );
    }

    /// Fails unless the loader finds the library at this path.
    #[track_caller]
    pub fn loads(&self, name: &str, path: &str) {
        assert_eq!(self.finds(name).as_deref(), Some(path), "{name}");
    }

    pub fn state(&self) -> String {
        format!(
            r#"{{"ociVersion":"1.0.2","id":"c","status":"created","pid":1,"bundle":{:?}}}"#,
            self.dir.0.join("bundle")
        )
    }

    /// Runs a hook, words separated by spaces.
    pub fn hook(&self, words: &str) -> Result<Outcome, String> {
        self.hook_with_state(words, self.state().as_bytes())
    }

    pub fn hook_with_state(&self, words: &str, state: &[u8]) -> Result<Outcome, String> {
        let path = self.dir.0.join("state.json"); // beside the bundle and what is outside
        write(&path, state);
        let words: Vec<String> = words.split_whitespace().map(str::to_string).collect();
        let result = hooks::run(&words, File::open(&path).unwrap());
        crate::remove(path);
        result
    }

    pub fn cache(&self) -> Cache {
        ld_so_cache::read(&crate::bytes(self.path("/etc/ld.so.cache"))).unwrap()
    }

    /// Path at which the loader finds a library.
    pub fn finds(&self, name: &str) -> Option<String> {
        self.cache()
            .entries
            .into_iter()
            .find(|e| e.name == name)
            .map(|e| e.path)
    }
}

/// Everything below a directory: kind, mode, owner, inode, time of the last change, a hash of the
/// content, the target. Without the directories named.
pub fn tree(directory: &Path, without: &[&str]) -> BTreeMap<PathBuf, String> {
    let mut all = BTreeMap::new();
    let mut todo = vec![directory.to_path_buf()];
    while let Some(path) = todo.pop() {
        let meta = fs::symlink_metadata(&path).unwrap();
        let kind = meta.file_type();
        let content = match () {
            () if kind.is_symlink() => format!("{:?}", fs::read_link(&path).unwrap()),
            () if kind.is_file() && meta.len() > 64 << 20 => format!("{} bytes", meta.len()),
            () if kind.is_file() => hash(&crate::bytes(&path)),
            () if kind.is_fifo() || kind.is_socket() || kind.is_char_device() => {
                format!("{:?}", meta.rdev())
            }
            () => {
                let entries = fs::read_dir(&path).unwrap().map(|e| e.unwrap());
                todo.extend(
                    entries
                        .filter(|e| !without.iter().any(|w| e.file_name() == **w))
                        .map(|e| e.path()),
                );
                String::new()
            }
        };
        let times = (meta.mtime(), meta.mtime_nsec());
        let state = format!(
            "{kind:?} {:o} {}:{} {} {times:?} {content}",
            meta.mode(),
            meta.uid(),
            meta.gid(),
            meta.ino()
        );
        all.insert(path.strip_prefix(directory).unwrap().to_path_buf(), state);
    }
    all
}

fn hash(content: &[u8]) -> String {
    use std::hash::{DefaultHasher, Hasher};
    let mut hasher = DefaultHasher::new();
    hasher.write(content);
    format!("{:x}", hasher.finish())
}

/// A 64-bit library with one section.
pub fn with_section(name: &str, content: &[u8]) -> Vec<u8> {
    let mut file = stand_in::library(Some("libcuda.so.1"), &[]);
    let names = format!("\0{name}\0.shstrtab\0");
    let at = file.len() as u64;
    file.extend(content);
    file.extend(names.as_bytes());
    let table = file.len() as u64;
    let header = |name: u32, kind: u32, offset: u64, size: u64| {
        [
            [name, kind].map(u32::to_le_bytes).concat(),
            [0, 0, offset, size, 0, 4, 0].map(u64::to_le_bytes).concat(),
        ]
        .concat()
    };
    file.extend(header(0, 0, 0, 0));
    file.extend(header(1, 7, at, content.len() as u64));
    file.extend(header(
        name.len() as u32 + 2,
        3,
        at + content.len() as u64,
        names.len() as u64,
    ));
    file[40..48].copy_from_slice(&table.to_le_bytes());
    file[58..64].copy_from_slice(&[64, 0, 3, 0, 2, 0]);
    file
}

/// The program as the tests were built, or as the guest has it, whichever is newer.
pub fn program() -> Option<PathBuf> {
    let exe = std::env::current_exe().unwrap();
    let debug = exe
        .parent()
        .and_then(Path::parent)
        .unwrap()
        .join("kata-gpu-init");
    let release = crate::guests_init();
    let newest = [debug, release]
        .into_iter()
        .filter_map(|p| Some((fs::metadata(&p).ok()?.modified().ok()?, p)))
        .max();
    if newest.is_none() {
        crate::skip("KATA_GPU_BUILT", "kata-gpu-init is not built");
    }
    newest.map(|(_, path)| path)
}

/// Runs the program as kata-agent does: under a name, with the state on its standard input, and
/// here with an environment that it must not look at.
pub fn as_a_process(
    name: &str,
    words: &[&str],
    state: &[u8],
    environment: &[(&str, &str)],
) -> Option<Output> {
    use std::os::unix::process::CommandExt;
    let mut command = Command::new(program()?);
    command
        .arg0(name)
        .args(words)
        .env_clear()
        .envs(environment.iter().copied());
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A hook that refuses early does not read all of it.
    let _unused = child.stdin.take().unwrap().write_all(state);
    let mut output = child.wait_with_output().unwrap();
    // The guest's program is static; one that was built for tests may not be, and then its loader
    // has its say about the environment.
    let own = crate::stderr(&output)
        .lines()
        .filter(|l| !l.starts_with("ERROR: ld.so"))
        .map(|l| format!("{l}\n"))
        .collect::<String>();
    output.stderr = own.into_bytes();
    Some(output)
}
