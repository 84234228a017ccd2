//! Configuration files of daemons, made in /run from the packages' files: paths lead into the
//! driver's root where the guest lacks them, and a few `KEY=VALUE` lines of fabric manager and
//! nvidia-imex get other values. The image's files are never written.

use super::service_plan::{fabric_mode, rail_policy};
use super::service_table::Name;
use super::state::RUN;
use crate::config::RailPolicy;
use crate::gpu::topology::Topology;
use crate::machine::files;
use std::path::{Path, PathBuf};

/// Longest file of a package that is read; the real ones have 10 to 20 kB.
pub const MAX_FILE: u64 = 256 * 1024;

/// Configuration of one daemon: the package's file below the driver root, the name in /run, and
/// the keys that get a value.
struct Source {
    package: &'static str,
    made: &'static str,
    values: Vec<(&'static str, &'static str)>,
}

/// Configuration file of a daemon's package, below the driver root, for daemons that do not run
/// without it.
pub const fn package(name: Name) -> Option<&'static str> {
    match name {
        Name::FabricManager => Some("usr/share/nvidia/nvswitch/fabricmanager.cfg"),
        Name::ImexDaemon => Some("etc/nvidia-imex/config.cfg"),
        Name::Nvlsm | Name::Persistenced | Name::HostEngine | Name::DcgmExporter => None,
    }
}

/// Keys for a daemon that stays in the foreground and logs to syslog. An empty file name is stdout
/// by the packages' comments; daemons were seen that write to their default file instead.
const FOREGROUND: [(&str, &str); 2] = [("DAEMONIZE", "0"), ("LOG_USE_SYSLOG", "1")];
/// State file of fabric manager in a service VM: active partitions, kept over its restarts.
const STATE_FILE: &str = "/run/nvidia-fabricmanager/fabricmanager.state";

fn source(
    name: Name,
    topology: Topology,
    confidential: bool,
    asked: Option<RailPolicy>,
    is_restart: bool,
) -> Option<Source> {
    let mut values = FOREGROUND.to_vec();
    let package = package(name)?;
    match name {
        Name::FabricManager => {
            values.push(("FABRIC_MODE", fabric_mode(topology)));
            if topology == Topology::ServiceVm {
                // A start from nothing would take the fabric from the guests that use it.
                let again = if is_restart { "1" } else { "0" };
                values.extend([
                    ("STATE_FILE_NAME", STATE_FILE),
                    ("FABRIC_MODE_RESTART", again),
                ]);
            }
            values.extend(rail_policy(asked, topology, confidential).map(|policy| {
                // Numbers are refused by fabric manager from 595 on.
                let word = match policy {
                    RailPolicy::Greedy => "greedy",
                    RailPolicy::Symmetric => "symmetric",
                };
                ("PARTITION_RAIL_POLICY", word)
            }));
            Some(Source {
                package,
                made: "fabricmanager.cfg",
                values,
            })
        }
        Name::ImexDaemon => Some(Source {
            package,
            made: "imex.cfg",
            values,
        }),
        Name::Nvlsm | Name::Persistenced | Name::HostEngine | Name::DcgmExporter => None,
    }
}

/// Makes a daemon's configuration; returns its path. Errors name the file and the cure.
pub fn make(
    name: Name,
    root: &Path,
    topology: Topology,
    confidential: bool,
    asked: Option<RailPolicy>,
) -> Result<PathBuf, String> {
    let is_restart = Path::new(STATE_FILE).exists();
    let source = source(name, topology, confidential, asked, is_restart)
        .ok_or_else(|| format!("{name} has no configuration"))?;
    if let Some(parent) = Path::new(STATE_FILE).parent() {
        std::fs::create_dir_all(parent).map_err(|e| format!("make {}: {e}", parent.display()))?;
    }
    let package = root.join(source.package);
    let text = led_below(&read(&package)?, root, Path::exists);
    let made = Path::new(RUN).join(source.made);
    let text = with_values(&text, &source.values)
        .map_err(|why| format!("{}: {why}", package.display()))?;
    write(made, &text)
}

/// A file for a daemon below the driver's root: a copy in /run where [`led_below`] changes it, else
/// itself, also where it is no text.
pub fn led(file: PathBuf, root: &Path) -> Result<PathBuf, String> {
    let Ok(text) = read(&file) else {
        return Ok(file);
    };
    let copy = led_below(&text, root, Path::exists);
    if copy == text {
        return Ok(file);
    }
    let made = Path::new(RUN).join(file.file_name().unwrap_or_default());
    write(made, &copy)
}

fn write(made: PathBuf, text: &str) -> Result<PathBuf, String> {
    std::fs::write(&made, text).map_err(|e| format!("write {}: {e}", made.display()))?;
    Ok(made)
}

/// Directories of logs, of state, and of what the kernel shows.
const WRITTEN: [&str; 6] = ["/var/", "/run/", "/tmp/", "/dev/", "/proc/", "/sys/"];

/// The text with each absolute path that leads nowhere in the guest and somewhere below the
/// driver's root led there: a package names paths as if its root were the guest's. Comments stay,
/// and what programs write, of which a root that was in use has old copies ([`WRITTEN`]).
fn led_below(text: &str, root: &Path, exists: impl Fn(&Path) -> bool) -> String {
    let ends_path = |c: char| c.is_whitespace() || "=\"',;:".contains(c);
    let mut made = String::with_capacity(text.len() + 256);
    for line in text.split_inclusive('\n') {
        let is_comment = line.trim_start().starts_with('#');
        for piece in line.split_inclusive(ends_path) {
            let path = piece.trim_end_matches(ends_path);
            let below = root.join(path.trim_start_matches('/'));
            let is_read = path.starts_with('/') && !WRITTEN.iter().any(|d| path.starts_with(d));
            if !is_comment && is_read && !exists(Path::new(path)) && exists(&below) {
                made.push_str(&below.to_string_lossy());
                made.push_str(&piece[path.len()..]);
            } else {
                made.push_str(piece);
            }
        }
    }
    made
}

fn read(path: &Path) -> Result<String, String> {
    let failed = |why: String| {
        format!(
            "read {}: {why}: put the file of the daemon's package into the image",
            path.display()
        )
    };
    let bytes = files::read(path, MAX_FILE + 1).map_err(|e| failed(e.to_string()))?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(failed(format!("more than {MAX_FILE} bytes")));
    }
    String::from_utf8(bytes).map_err(|_| failed("not text".into()))
}

/// The text with these values: each key's line is replaced where it stands, further lines of the
/// key are dropped, and a key without a line gets one at the end. All other lines stay.
pub fn with_values(text: &str, values: &[(&str, &str)]) -> Result<String, String> {
    let key_of = |line: &str| {
        let line = line.trim();
        let is_setting = !line.is_empty() && !line.starts_with('#');
        is_setting.then(|| line.split_once('=').map(|(key, _)| key.trim().to_string()))
    };
    let mut set = vec![false; values.len()];
    let mut made = String::with_capacity(text.len() + 128);
    for (number, line) in text.lines().enumerate() {
        let Some(setting) = key_of(line) else {
            made.push_str(line);
            made.push('\n');
            continue;
        };
        let key = setting.ok_or_else(|| {
            format!(
                "line {}: neither KEY=VALUE nor a comment: is this the daemon's configuration?",
                number + 1
            )
        })?;
        match values.iter().position(|(other, _)| *other == key) {
            Some(at) if set[at] => {}
            Some(at) => {
                made.push_str(&format!("{key}={}\n", values[at].1));
                set[at] = true;
            }
            None => {
                made.push_str(line);
                made.push('\n');
            }
        }
    }
    for ((key, value), _) in values.iter().zip(set).filter(|(_, is_set)| !is_set) {
        made.push_str(&format!("{key}={value}\n"));
    }
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKAGE: &str = "# Description: mode\n\nFABRIC_MODE=0\nDAEMONIZE=1\n  \
        LOG_FILE_NAME = /var/log/fabricmanager.log\n\
        STATE_FILE_NAME=/var/tmp/fabricmanager.state\nDAEMONIZE=1\n\
        #PARTITION_RAIL_POLICY=greedy\nPARTITION_RAIL_POLICY=greedy";

    #[test]
    fn a_key_is_set_where_it_stands_and_every_other_line_stays() {
        let values = [
            ("FABRIC_MODE", "1"),
            ("DAEMONIZE", "0"),
            ("LOG_FILE_NAME", ""),
            ("LOG_USE_SYSLOG", "0"),
        ];
        assert_eq!(
            with_values(PACKAGE, &values).unwrap(),
            "# Description: mode\n\nFABRIC_MODE=1\nDAEMONIZE=0\nLOG_FILE_NAME=\n\
             STATE_FILE_NAME=/var/tmp/fabricmanager.state\n#PARTITION_RAIL_POLICY=greedy\n\
             PARTITION_RAIL_POLICY=greedy\nLOG_USE_SYSLOG=0\n"
        );
    }

    #[test]
    fn a_path_that_only_the_drivers_root_has_leads_there() {
        let exists = |path: &Path| {
            let there = [
                "/gpu/usr/share/nvidia/nvswitch",
                "/gpu/etc/nvidia-imex/nodes_config.cfg",
                "/gpu/etc/hosts",
                "/etc/hosts",
                "/gpu/plugin.conf",
                "/var/log",
                // The root was in use.
                "/gpu/var/log/nvlsm.log",
            ];
            there.map(Path::new).contains(&path)
        };
        let led = |line| led_below(line, Path::new("/gpu"), exists);
        for (line, expected) in [
            // Fabric manager of Kata 4.0's images: the base has no topologies.
            (
                "TOPOLOGY_FILE_PATH=/usr/share/nvidia/nvswitch\n",
                "TOPOLOGY_FILE_PATH=/gpu/usr/share/nvidia/nvswitch\n",
            ),
            (
                "KEY = \"/etc/nvidia-imex/nodes_config.cfg\"\r\n",
                "KEY = \"/gpu/etc/nvidia-imex/nodes_config.cfg\"\r\n",
            ),
            // nvlsm separates by white space.
            (
                "event_plugin_options --config_file /plugin.conf",
                "event_plugin_options --config_file /gpu/plugin.conf",
            ),
            (
                "PATHS=/etc/hosts:/plugin.conf,/x",
                "PATHS=/etc/hosts:/gpu/plugin.conf,/x",
            ),
        ] {
            assert_eq!(led(line), expected);
        }
        for kept in [
            "# TOPOLOGY_FILE_PATH=/usr/share/nvidia/nvswitch\n",
            "LOG_FILE_NAME=/var/log/fabricmanager.log\n\n",
            "log_file /var/log/nvlsm.log\n",
            "HOSTS=/etc/hosts\n",
            "NAME=usr/share/nvidia/nvswitch, x/plugin.conf\n",
            "LEVEL=4",
        ] {
            assert_eq!(led(kept), kept);
        }
    }

    #[test]
    fn a_file_that_is_no_configuration_is_refused_with_its_line() {
        assert!(
            with_values("#!/bin/sh\nexit 1\n", &[])
                .unwrap_err()
                .starts_with("line 2: ")
        );
    }

    #[test]
    fn the_values_follow_from_topology_and_command_line() {
        let values = |topology, confidential, asked| {
            source(Name::FabricManager, topology, confidential, asked, false)
                .unwrap()
                .values
        };
        assert!(values(Topology::HopperFabric, false, None).contains(&("FABRIC_MODE", "0")));
        assert!(values(Topology::ServiceVm, false, None).contains(&("FABRIC_MODE", "1")));
        let restarts = |topology, is_restart| {
            let values = source(Name::FabricManager, topology, false, None, is_restart)
                .unwrap()
                .values;
            values
                .into_iter()
                .find(|(key, _)| *key == "FABRIC_MODE_RESTART")
                .map(|(_, value)| value)
        };
        assert_eq!(
            (
                restarts(Topology::ServiceVm, false),
                restarts(Topology::ServiceVm, true)
            ),
            (Some("0"), Some("1"))
        );
        assert_eq!(restarts(Topology::HopperFabric, true), None);
        let symmetric = ("PARTITION_RAIL_POLICY", "symmetric");
        assert!(
            values(Topology::HopperFabric, false, Some(RailPolicy::Symmetric)).contains(&symmetric)
        );
        assert!(
            !values(Topology::HopperFabric, true, None)
                .iter()
                .any(|(key, _)| *key == symmetric.0)
        );
        assert!(values(Topology::BlackwellFabric, true, None).contains(&symmetric));
    }
}
