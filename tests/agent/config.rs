//! What the kernel command line asks of the test agent. A bad value of a known parameter is an error, which ends the agent as it ends the real one.

/// The release this agent behaves like, unless `testagent.version` says otherwise.
pub const AGENT_VERSION: &str = "4.1.0";
/// First release that fails at once on a device that a present kind does not list.
const FAIL_FAST: (u32, u32) = (3, 32);

/// A container to create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub name: String,
    /// Names of devices of kind nvidia.com/gpu.
    pub devices: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub containers: Vec<Wanted>,
    pub cdi_timeout_s: u64,
    /// Whether unlisted devices fail at once.
    pub fail_fast: bool,
    pub guest_half: Option<String>,
    pub poweroff: bool,
}

impl Config {
    pub fn parse(command_line: &str) -> Result<Self, String> {
        let mut config = Self { containers: vec![], cdi_timeout_s: 100, fail_fast: true, guest_half: None, poweroff: false };
        for word in command_line.split_ascii_whitespace() {
            let Some((name, value)) = word.split_once('=') else { continue };
            let bad = |what: &str| format!("{name}={value}: {what}");
            match name {
                "agent.cdi_timeout" => config.cdi_timeout_s = value.parse().map_err(|_| bad("unable to parse timeout"))?,
                "agent.log" if !["fatal", "critical", "error", "warn", "warning", "info", "debug", "trace"].contains(&value) => {
                    return Err(bad("invalid log level"));
                }
                "testagent.version" => {
                    let mut parts = value.split('.').map(str::parse::<u32>);
                    let (Some(Ok(major)), Some(Ok(minor))) = (parts.next(), parts.next()) else { return Err(bad("not a version")) };
                    config.fail_fast = (major, minor) >= FAIL_FAST;
                }
                "testagent.containers" => {
                    for one in value.split(';').filter(|c| !c.is_empty()) {
                        let (name, devices) = one.split_once(':').ok_or_else(|| bad("want NAME:DEVICE[,DEVICE..][;..]"))?;
                        config.containers.push(Wanted { name: name.into(), devices: devices.split(',').map(str::to_string).collect() });
                    }
                }
                "testagent.guest" => config.guest_half = Some(value.into()),
                "testagent.poweroff" => config.poweroff = value == "on",
                _ => {}
            }
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_and_versions_are_read() {
        let config = Config::parse("quiet testagent.containers=one:0;pair:1,2 testagent.version=3.31.0 agent.cdi_timeout=7\n").unwrap();
        assert_eq!(config.containers[1], Wanted { name: "pair".into(), devices: vec!["1".into(), "2".into()] });
        assert_eq!((config.fail_fast, config.cdi_timeout_s), (false, 7));
        assert!(Config::parse("testagent.version=3.32.0").unwrap().fail_fast);
    }

    #[test]
    fn unknown_words_are_ignored_and_bad_values_are_not() {
        assert!(Config::parse("gpuinit.bind=fast nvrc.log=x agent.unknown=1").is_ok());
        assert!(Config::parse("agent.cdi_timeout=x").is_err());
        assert!(Config::parse("agent.log=foo").is_err());
    }
}
