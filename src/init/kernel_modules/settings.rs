//! Configuration of modprobe.d: options, aliases, soft dependencies and blacklists. Commands
//! (`install`, `remove`) are parsed only to be logged, and never run.
//!
//! Files and their order are kmod's: all `*.conf` of five directories, sorted by name, where a name
//! in an earlier directory hides the same name in a later one; `modules.softdep` sorts among them
//! by its name. Options of the kernel command line come last.

use super::pattern::{matches, normalised};
use crate::config::{module_blacklist, module_parameters};
use crate::machine::files;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// Directories of modprobe.d, the strongest first.
const DIRECTORIES: [&str; 5] = [
    "etc/modprobe.d",
    "run/modprobe.d",
    "usr/local/lib/modprobe.d",
    "usr/lib/modprobe.d",
    "lib/modprobe.d",
];
/// Soft dependencies that depmod collects from the modules, in modprobe.d's format.
const SOFTDEP: &str = "modules.softdep";
/// Limit of a file: none of this kind has more than some kB.
const MAX_FILE: u64 = 1 << 20;
/// Limit of all files.
const MAX_ALL: usize = 8 << 20;
/// Limit of reported faults, of all files and of the commands for one module.
const MAX_PROBLEMS: usize = 64;
/// Limit of foreign text in a problem, in characters.
const MAX_TEXT: usize = 64;

/// Fault in a file or a line of it. Never stops a load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub file: PathBuf,
    /// Line number from 1; 0 for the whole file.
    pub line: usize,
    pub what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        write!(f, ": {}", self.what)
    }
}

/// Optional modules to load before and after another one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Softdep {
    pattern: String,
    pub pre: Vec<String>,
    pub post: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Command {
    pattern: String,
    problem: Problem,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Pattern and module.
    aliases: Vec<(String, String)>,
    /// Module (or alias) and options, in order.
    options: Vec<(String, String)>,
    softdeps: Vec<Softdep>,
    blacklist: Vec<String>,
    commands: Vec<Command>,
    command_line: Vec<u8>,
}

impl Settings {
    /// Reads all files for the modules in `directory`. Missing files are no problem.
    pub fn read(root: &Path, directory: &Path, command_line: &[u8]) -> (Self, Vec<Problem>) {
        let mut settings = Self {
            blacklist: module_blacklist(command_line),
            command_line: command_line.to_vec(),
            ..Self::default()
        };
        let mut problems = Vec::new();
        let mut left = MAX_ALL;
        for file in files(root, directory, &mut problems) {
            let text = text(&file).and_then(|text| {
                left = left.checked_sub(text.len()).ok_or_else(|| {
                    format!("left out: modprobe.d has more than {MAX_ALL} bytes in all")
                })?;
                Ok(text)
            });
            match text {
                Ok(text) => problems.extend(settings.parse(&file, &text)),
                Err(what) => problems.push(Problem {
                    file,
                    line: 0,
                    what,
                }),
            }
            problems.truncate(MAX_PROBLEMS);
        }
        (settings, problems)
    }

    /// Parses one file's text and returns its first faults. Faulty lines are left out.
    pub fn parse(&mut self, file: &Path, text: &str) -> Vec<Problem> {
        let mut problems = Vec::new();
        for (number, line) in lines(text) {
            if line.starts_with('#') {
                continue;
            }
            if let Err(what) = self.line(file, number, &line)
                && problems.len() < MAX_PROBLEMS
            {
                problems.push(Problem {
                    file: file.into(),
                    line: number,
                    what,
                });
            }
        }
        problems
    }

    fn line(&mut self, file: &Path, line: usize, text: &str) -> Result<(), String> {
        let Some((verb, rest)) = word(text) else {
            return Ok(());
        };
        if text.contains('\0') {
            return Err("has a NUL byte; left out".into());
        }
        let (name, rest) = word(rest).unwrap_or_default();
        let bad = || {
            format!(
                "{:?} is not a line that modprobe.d knows; left out",
                cut(text)
            )
        };
        let name = normalised(name).filter(|n| !n.is_empty()).ok_or_else(bad)?;
        let rest = rest.trim_matches(BLANK);
        match (verb, rest) {
            ("blacklist", _) => self.blacklist.push(name),
            (_, "") => return Err(bad()),
            ("alias", _) => {
                let module = rest
                    .split(BLANK)
                    .next()
                    .and_then(normalised)
                    .ok_or_else(bad)?;
                self.aliases.push((name, module));
            }
            ("options", _) => self.options.push((name, rest.replace('\t', " "))),
            ("softdep", _) => self.softdeps.push(softdep(name, rest)),
            ("install" | "remove", _) => {
                let what = format!(
                    "{verb} command for {} is not run: this init runs no commands: {:?}",
                    cut(&name),
                    cut(rest)
                );
                self.commands.push(Command {
                    pattern: name,
                    problem: Problem {
                        file: file.into(),
                        line,
                        what,
                    },
                });
            }
            // Keyword for tools that build images; a load ignores it.
            ("weakdep", _) => {}
            _ => return Err(bad()),
        }
        Ok(())
    }

    /// Modules of an alias, each with the alias as written. Also matches names of modules: an alias
    /// can replace a module.
    pub fn aliased(&self, name: &str) -> Vec<(&str, &str)> {
        self.aliases
            .iter()
            .filter(|(pattern, _)| matches(pattern, name))
            .map(|(pattern, module)| (pattern.as_str(), module.as_str()))
            .collect()
    }

    /// Whether a module is not to be loaded through an alias.
    pub fn is_blacklisted(&self, module: &str) -> bool {
        self.blacklist.iter().any(|b| b == module)
    }

    /// Soft dependencies of a module. Only the first match counts, as in kmod.
    pub fn softdep(&self, module: &str) -> Option<&Softdep> {
        self.softdeps.iter().find(|s| matches(&s.pattern, module))
    }

    /// Options for a module, those of the command line last. `alias`: the alias that led to the
    /// module.
    pub fn options(&self, module: &str, alias: Option<&str>) -> String {
        let mut options: Vec<String> = self
            .options
            .iter()
            .filter(|(name, _)| name == module || Some(name.as_str()) == alias)
            .map(|(_, o)| o.clone())
            .collect();
        options.push(module_parameters(&self.command_line, module));
        options.retain(|o| !o.is_empty());
        options.join(" ")
    }

    /// Commands that modprobe would run for this module.
    pub fn commands(&self, module: &str) -> impl Iterator<Item = &Problem> {
        self.commands
            .iter()
            .filter(move |c| matches(&c.pattern, module))
            .map(|c| &c.problem)
            .take(MAX_PROBLEMS)
    }
}

const BLANK: [char; 2] = [' ', '\t'];

/// The first word of a line, and the rest.
fn word(text: &str) -> Option<(&str, &str)> {
    let text = text.trim_start_matches(BLANK);
    (!text.is_empty()).then(|| text.split_once(BLANK).unwrap_or((text, "")))
}

fn cut(text: &str) -> String {
    text.chars().take(MAX_TEXT).collect()
}

fn softdep(pattern: String, text: &str) -> Softdep {
    let mut softdep = Softdep {
        pattern,
        ..Softdep::default()
    };
    let mut list: Option<&mut Vec<String>> = None;
    for word in text.split_ascii_whitespace() {
        match (word, &mut list) {
            ("pre:", _) => list = Some(&mut softdep.pre),
            ("post:", _) => list = Some(&mut softdep.post),
            (name, Some(list)) => list.push(name.into()),
            (_, None) => {} // before the first of both words nothing means anything
        }
    }
    softdep
}

/// Lines with their numbers, joined at a backslash before the end of a line. Elsewhere the
/// backslash is removed and the next character kept.
fn lines(text: &str) -> Vec<(usize, String)> {
    let mut lines = Vec::new();
    let (mut first, mut number) = (1, 1);
    let mut line = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        let c = match c {
            '\\' => match chars.next() {
                Some('\n') => {
                    number += 1;
                    continue;
                }
                Some(c) => c,
                None => break,
            },
            '\n' => {
                lines.push((first, std::mem::take(&mut line)));
                number += 1;
                first = number;
                continue;
            }
            c => c,
        };
        line.push(c);
    }
    lines.push((first, line));
    lines.retain(|(_, line)| !line.is_empty());
    lines
}

/// Effective files, in order.
fn files(root: &Path, directory: &Path, problems: &mut Vec<Problem>) -> Vec<PathBuf> {
    let mut files = BTreeMap::new();
    let softdep = directory.join(SOFTDEP);
    if softdep.exists() {
        files.insert(SOFTDEP.to_string(), softdep);
    }
    for directory in DIRECTORIES.map(|d| root.join(d)) {
        let entries = match std::fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => {
                problems.push(Problem {
                    file: directory,
                    line: 0,
                    what: format!("read directory: {error}; left out"),
                });
                continue;
            }
        };
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if !name.starts_with('.') && name.ends_with(".conf") {
                files.entry(name).or_insert_with(|| entry.path());
            }
        }
    }
    files.into_values().collect()
}

fn text(file: &Path) -> Result<String, String> {
    // A link to /dev/null hides the file of that name in later directories.
    if std::fs::read_link(file).is_ok_and(|target| target == Path::new("/dev/null")) {
        return Ok(String::new());
    }
    let meta = std::fs::metadata(file).map_err(|e| format!("read: {e}; left out"))?;
    if !meta.is_file() {
        return Err("is not a file; left out".into()); // to open a pipe would wait for its writer
    }
    let bytes = files::read(file, MAX_FILE + 1).map_err(|e| format!("read: {e}; left out"))?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(format!("is longer than {MAX_FILE} bytes; left out"));
    }
    String::from_utf8(bytes).map_err(|e| {
        format!(
            "byte {} is not UTF-8; left out",
            e.utf8_error().valid_up_to()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;

    fn parsed(text: &str) -> (Settings, Vec<String>) {
        let mut settings = Settings::default();
        let problems = settings.parse(Path::new("t.conf"), text);
        (settings, problems.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn every_kind_of_line_is_taken() {
        let (settings, problems) = parsed(include_str!(
            "../../../tests/fixtures/modules/modprobe.d/nvidia.conf"
        ));
        assert_eq!(problems, Vec::<String>::new());
        assert_eq!(
            settings.options("nvidia", None),
            "NVreg_DeviceFileMode=0660 NVreg_RegistryDwords=\"A=1; B=2\" NVreg_Other=1"
        );
        assert_eq!(settings.options("nvidia_uvm", None), "uvm_x=1");
        assert_eq!(
            settings.aliased("char_major_195_0"),
            [("char_major_195_*", "nvidia")]
        );
        assert_eq!(settings.aliased("nouveau"), [("nouveau", "off")]);
        assert!(settings.is_blacklisted("nvidia_drm") && !settings.is_blacklisted("nvidia"));
        let softdep = settings.softdep("nvidia").unwrap();
        assert_eq!(
            (softdep.pre.join(" "), softdep.post.join(" ")),
            ("drm ecdh_generic".into(), "nvidia-uvm".into())
        );
        let commands: Vec<String> = settings
            .commands("nvidia_modeset")
            .map(ToString::to_string)
            .collect();
        assert_eq!(
            commands,
            [
                "t.conf:17: install command for nvidia_modeset is not run: this init runs no \
                    commands: \"/sbin/modprobe -i nvidia-modeset\""
            ]
        );
    }

    #[test]
    fn the_command_line_comes_last() {
        let (mut settings, _) = parsed("options nvidia a=1\noptions nv* b=2\noptions gpu c=3\n");
        settings.command_line = b"quiet nvidia.a=9 nvidia-uvm.x=1".to_vec();
        assert_eq!(settings.options("nvidia", None), "a=1 a=9");
        assert_eq!(settings.options("nvidia", Some("gpu")), "a=1 c=3 a=9");
        assert_eq!(settings.options("nvidia_uvm", None), "x=1");
    }

    #[test]
    fn bad_lines_are_reported_with_their_place_and_omitted() {
        let text = "options\noptions nvidia\nalias a\nalias a] b\nalias a [b\nfrobnicate x y\n \
            \\\n  softdep\n\ninclude /etc/x\n  # late\nblacklist ok\nalias x \u{0} y\n\\";
        let (settings, problems) = parsed(text);
        let places: Vec<&str> = problems
            .iter()
            .filter_map(|p| p.split(':').nth(1))
            .collect();
        assert_eq!(
            places,
            ["1", "2", "3", "4", "5", "6", "7", "10", "11", "13"],
            "{problems:?}"
        );
        assert_eq!(
            settings,
            Settings {
                blacklist: vec!["ok".into()],
                ..Settings::default()
            }
        );
        assert_eq!(
            problems[1],
            "t.conf:2: \"options nvidia\" is not a line that modprobe.d knows; left out"
        );
    }

    #[test]
    fn lines_are_joined_and_may_be_long() {
        let long = format!(
            "options nvidia a={}\\\n b=2\\c\noptions nvidia d=1",
            "x".repeat(100_000)
        );
        let (settings, problems) = parsed(&long);
        assert!(problems.is_empty(), "{problems:?}");
        assert!(settings.options("nvidia", None).ends_with("x b=2c d=1"));
        let (_, problems) = parsed(&"y".repeat(100_000));
        assert!(
            problems.len() == 1 && problems[0].len() < 200,
            "{problems:?}"
        );
    }

    #[test]
    fn faults_without_end_are_a_bounded_number_of_events_and_bytes() {
        let folder = temp_dir();
        let directory = folder.path().join("etc/modprobe.d");
        std::fs::create_dir_all(&directory).unwrap();
        let write = |name: &str, text: String| std::fs::write(directory.join(name), text).unwrap();
        (0..10).for_each(|n| write(&format!("{n}.conf"), "options m x=1\n".repeat(70_000)));
        write("a.conf", "x\n".repeat(100_000));
        write("b.conf", "install m true\n".repeat(1000));
        let (settings, problems) = Settings::read(folder.path(), folder.path(), b"");
        assert!(
            problems[0]
                .to_string()
                .ends_with("modprobe.d has more than 8388608 bytes in all"),
            "{}",
            problems[0]
        );
        assert_eq!(problems.len(), MAX_PROBLEMS);
        assert_eq!(settings.commands("m").count(), MAX_PROBLEMS);
        assert_eq!(settings.options.len(), 8 * 70_000);
    }

    #[test]
    fn an_earlier_directory_hides_a_later_ones_file() {
        let folder = temp_dir();
        let root = folder.path();
        let modules = root.join("lib/modules/6.1");
        std::fs::create_dir_all(&modules).unwrap();
        let write = |path: &str, text: &[u8]| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("etc/modprobe.d/b.conf", b"options m from=etc");
        write("lib/modprobe.d/b.conf", b"options m from=lib");
        write("usr/lib/modprobe.d/a.conf", b"options m from=usr");
        write(
            "run/modprobe.d/z.conf",
            b"softdep m pre: late\noptions m from=run",
        );
        write("etc/modprobe.d/not-read", b"options m from=nowhere");
        write("etc/modprobe.d/.hidden.conf", b"options m from=nowhere");
        write("etc/modprobe.d/bytes.conf", b"options m x=\xff\n");
        std::fs::create_dir_all(root.join("etc/modprobe.d/folder.conf")).unwrap();
        write("lib/modprobe.d/masked.conf", b"options m from=masked");
        std::os::unix::fs::symlink("/dev/null", root.join("etc/modprobe.d/masked.conf")).unwrap();
        write(
            "lib/modules/6.1/modules.softdep",
            b"# from depmod\nsoftdep m pre: early\n",
        );
        let (settings, problems) = Settings::read(
            root,
            &modules,
            b"m.from=command-line modprobe.blacklist=p-1,q",
        );
        assert_eq!(
            settings.options("m", None),
            "from=usr from=etc from=run from=command-line"
        );
        assert_eq!(settings.softdep("m").unwrap().pre, ["early"]);
        assert!(settings.is_blacklisted("p_1") && settings.is_blacklisted("q"));
        let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
        assert!(
            problems[0].ends_with("etc/modprobe.d/bytes.conf: byte 12 is not UTF-8; left out"),
            "{problems:?}"
        );
        assert!(
            problems[1].ends_with("etc/modprobe.d/folder.conf: is not a file; left out"),
            "{problems:?}"
        );
        assert_eq!(problems.len(), 2);
    }
}
