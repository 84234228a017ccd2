//! The command line of a hook: the incumbent's commands and flags, and ours. Pure.
//!
//! Syntax as the incumbent's: `--flag value`, `--flag=value` and one dash instead of two are the
//! same, and lists may be given flag by flag or with commas.

use kata_gpu_wire::named;
use std::path::PathBuf;

named! {
    /// Hook commands.
    pub enum Command {
        CreateSymlinks = "create-symlinks",
        UpdateLdcache = "update-ldcache",
        EnableCudaCompat = "enable-cuda-compat",
        DisableDeviceNodeModification = "disable-device-node-modification",
        UpdateApplicationProfile = "update-application-profile",
        /// Links, choice of CUDA libraries and cache in one run.
        Prepare = "prepare",
        /// Incumbent's command; refused.
        Chmod = "chmod",
        /// Incumbent's command for testing whether hooks run.
        Noop = "noop",
    }
}

named! {
    enum Flag {
        Link = "link",
        Folder = "folder",
        LdconfigPath = "ldconfig-path",
        HostDriverVersion = "host-driver-version",
        HostCudaVersion = "host-cuda-version",
        CudaCompatContainerRoot = "cuda-compat-container-root",
        ContainerSpec = "container-spec",
        Path = "path",
        Mode = "mode",
    }
}

impl Command {
    const fn flags(self) -> &'static [Flag] {
        use Flag::*;
        match self {
            Self::CreateSymlinks => &[Link, ContainerSpec],
            Self::UpdateLdcache => &[Folder, LdconfigPath, ContainerSpec],
            Self::EnableCudaCompat => &[
                HostDriverVersion,
                HostCudaVersion,
                CudaCompatContainerRoot,
                ContainerSpec,
            ],
            Self::DisableDeviceNodeModification | Self::UpdateApplicationProfile => {
                &[ContainerSpec]
            }
            Self::Prepare => &[
                Link,
                Folder,
                LdconfigPath,
                HostDriverVersion,
                HostCudaVersion,
                CudaCompatContainerRoot,
                ContainerSpec,
            ],
            Self::Chmod => &[Path, Mode, ContainerSpec],
            Self::Noop => &[],
        }
    }
}

/// A link to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Target as written into the link.
    pub target: PathBuf,
    /// The link itself.
    pub path: PathBuf,
}

/// Arguments of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Arguments {
    pub links: Vec<Link>,
    pub folders: Vec<String>,
    /// Version of the loaded driver.
    pub host_driver_version: String,
    /// CUDA version that the driver supports.
    pub host_cuda_version: String,
    /// Folder of CUDA's compatibility libraries in the image; None: the usual place.
    pub cuda_compat_container_root: Option<String>,
    /// File with the state, instead of standard input.
    pub container_spec: Option<PathBuf>,
}

/// Meaning of a command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meaning {
    Run(Command, Box<Arguments>),
    Help,
    Version,
    /// No command, or one of a later generator: log it and let the container start, as the
    /// incumbent does.
    Unsupported(Option<String>),
}

/// Parses the arguments after the program's name.
///
/// Error: an unknown flag, a flag without its value, or an invalid value.
pub fn parse(words: &[String]) -> Result<Meaning, String> {
    let mut words = words.iter().map(String::as_str);
    let name = loop {
        match words.next() {
            None => return Ok(Meaning::Unsupported(None)),
            Some("--help" | "-h" | "help") => return Ok(Meaning::Help),
            Some("--version" | "-v") => return Ok(Meaning::Version),
            // --debug, --quiet: the incumbent's; there is one level of detail here
            Some(flag) if flag.starts_with('-') => {}
            Some(name) => break name,
        }
    };
    let Some(command) = Command::named(name) else {
        return Ok(Meaning::Unsupported(Some(name.to_string())));
    };
    let flags = command.flags();
    let mut arguments = Arguments::default();
    while let Some(word) = words.next() {
        let dashed = word
            .strip_prefix("--")
            .or_else(|| word.strip_prefix('-'))
            .filter(|w| !w.is_empty());
        let Some(dashed) = dashed else {
            return Err(format!("{name}: {word:?} is no flag"));
        };
        if matches!(dashed, "help" | "h") {
            return Ok(Meaning::Help);
        }
        let (flag, value) = dashed
            .split_once('=')
            .map_or((dashed, None), |(flag, value)| (flag, Some(value)));
        let known = flags.iter().find(|f| f.name() == flag);
        let known = known
            .ok_or_else(|| format!("{name}: unknown flag --{flag}; it has {}", listed(flags)))?;
        let value = value
            .or_else(|| words.next())
            .ok_or_else(|| format!("{name}: --{flag} needs a value"))?;
        arguments
            .set(*known, value)
            .map_err(|why| format!("{name}: --{flag} {value:?}: {why}"))?;
    }
    Ok(Meaning::Run(command, Box::new(arguments)))
}

fn listed(flags: &[Flag]) -> String {
    flags
        .iter()
        .map(|f| format!("--{}", f.name()))
        .collect::<Vec<_>>()
        .join(", ")
}

/// Help text: the commands and their flags.
pub fn help() -> String {
    Command::ALL
        .into_iter()
        .filter(|command| *command != Command::Noop)
        .map(|command| format!("  {command} {}\n", listed(command.flags())))
        .collect()
}

impl Arguments {
    fn set(&mut self, flag: Flag, value: &str) -> Result<(), &'static str> {
        let parts = || value.split(',').filter(|part| !part.is_empty());
        match flag {
            Flag::Link => {
                for part in parts() {
                    let link = part.split_once("::").filter(|(target, path)| {
                        !target.is_empty() && !path.is_empty() && !path.contains("::")
                    });
                    let (target, path) = link.ok_or("a link is given as TARGET::LINK")?;
                    let link = Link {
                        target: target.into(),
                        path: path.into(),
                    };
                    if !self.links.contains(&link) {
                        self.links.push(link);
                    }
                }
            }
            Flag::Folder => {
                for part in parts() {
                    let folder = part.trim_end_matches('/');
                    // The folder becomes a line of ld.so.conf and a part of musl's colon-separated
                    // path file.
                    if !folder.starts_with('/')
                        || folder.contains(|c: char| c.is_control() || matches!(c, '#' | ':' | ' '))
                    {
                        return Err("a folder is an absolute path without spaces, '#' or ':'");
                    }
                    if !self.folders.iter().any(|f| f == folder) {
                        self.folders.push(folder.to_string());
                    }
                }
            }
            Flag::HostDriverVersion => self.host_driver_version = value.to_string(),
            Flag::HostCudaVersion => self.host_cuda_version = value.to_string(),
            Flag::CudaCompatContainerRoot => {
                if !value.starts_with('/') || value.contains(|c: char| c.is_control() || c == '#') {
                    return Err("the folder is an absolute path without '#'");
                }
                self.cuda_compat_container_root = Some(value.to_string());
            }
            Flag::ContainerSpec => {
                self.container_spec = (!matches!(value, "" | "-")).then(|| value.into())
            }
            // Nothing is executed; chmod is refused as a whole.
            Flag::LdconfigPath | Flag::Path | Flag::Mode => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(words: &str) -> Result<Meaning, String> {
        parse(
            &words
                .split(' ')
                .filter(|w| !w.is_empty())
                .map(str::to_string)
                .collect::<Vec<_>>(),
        )
    }

    fn arguments(words: &str) -> Arguments {
        match read(words) {
            Ok(Meaning::Run(_, arguments)) => *arguments,
            other => panic!("{words}: {other:?}"),
        }
    }

    #[test]
    fn every_hook_of_the_incumbents_spec_is_understood() {
        let link = arguments(
            "create-symlinks --link ../libx.so.1::/usr/lib/gbm/x.so \
                --link=libcuda.so.1::/usr/lib/libcuda.so",
        );
        assert_eq!(link.links.len(), 2);
        assert_eq!(
            link.links[0],
            Link {
                target: "../libx.so.1".into(),
                path: "/usr/lib/gbm/x.so".into()
            }
        );
        assert_eq!(
            arguments("enable-cuda-compat --host-driver-version=550.163.01").host_driver_version,
            "550.163.01"
        );
        let cache = arguments(
            "update-ldcache --ldconfig-path /sbin/ldconfig --folder /usr/lib64/ -folder=/a,/b \
                --folder /a",
        );
        assert_eq!(cache.folders, ["/usr/lib64", "/a", "/b"]);
        for command in Command::ALL {
            assert!(
                matches!(
                    read(&format!("--debug {command}")),
                    Ok(Meaning::Run(c, _)) if c == command
                ),
                "{command}"
            );
        }
    }

    #[test]
    fn standard_input_is_an_empty_name_or_a_dash() {
        assert_eq!(
            arguments("create-symlinks --container-spec -").container_spec,
            None
        );
        assert_eq!(
            arguments("create-symlinks --container-spec=").container_spec,
            None
        );
        assert_eq!(
            arguments("create-symlinks --container-spec /state").container_spec,
            Some("/state".into())
        );
    }

    #[test]
    fn unknown_commands_are_no_error_and_wrong_flags_are() {
        assert_eq!(
            read("frobnicate --x"),
            Ok(Meaning::Unsupported(Some("frobnicate".into())))
        );
        assert_eq!(read(""), Ok(Meaning::Unsupported(None)));
        assert_eq!(read("--help"), Ok(Meaning::Help));
        assert_eq!(read("update-ldcache --help"), Ok(Meaning::Help));
        let cases = [
            (
                "update-ldcache --link a::b",
                "unknown flag --link; it has --folder, --ldconfig-path, --container-spec",
            ),
            ("update-ldcache --folder", "--folder needs a value"),
            ("update-ldcache --folder lib", "an absolute path"),
            ("update-ldcache --folder /a\n/b", "an absolute path"),
            ("update-ldcache /usr/lib", "is no flag"),
            ("create-symlinks --link a", "TARGET::LINK"),
            ("create-symlinks --link a::b::c", "TARGET::LINK"),
            ("create-symlinks --link ::b", "TARGET::LINK"),
            (
                "enable-cuda-compat --cuda-compat-container-root=compat",
                "an absolute path",
            ),
        ];
        for (words, says) in cases {
            assert!(
                read(words).is_err_and(|e| e.contains(says)),
                "{words}: {:?}",
                read(words)
            );
        }
    }
}
