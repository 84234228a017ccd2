//! Rules for CDI specs, one a row: the defect's effect, the Kata versions concerned, and the cure.
//!
//! A rule that `refuses` claims that an agent does not load the file at all. The agents' own crates
//! decide on that: the finding is dropped where they load the file, and a refusal that no rule
//! explains becomes [`REFUSED`] with the crate's error.

use kata_gpu_report::data::text::clipped;
use kata_gpu_report::severity::Severity;
use std::borrow::Cow;

/// The agents, by the crate that they read CDI specs with (`src/agent/Cargo.lock` of each release).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, clap::ValueEnum)]
pub enum Agent {
    /// container-device-interface 0.1.2: 3.25.0 to 3.32.0 (3.22.0 to 3.24.0 have 0.1.0, which is
    /// not tried).
    #[value(name = "3")]
    Kata3,
    /// container-device-interface 1.1.1: 4.0.0, 4.1.0.
    #[value(name = "4")]
    Kata4,
}

impl Agent {
    pub const ALL: [Agent; 2] = [Agent::Kata3, Agent::Kata4];

    pub fn name(self) -> &'static str {
        match self {
            Agent::Kata3 => "Kata <= 3.32",
            Agent::Kata4 => "Kata 4",
        }
    }
}

/// A set of agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Agents {
    pub kata3: bool,
    pub kata4: bool,
}

impl Agents {
    pub const BOTH: Agents = Agents {
        kata3: true,
        kata4: true,
    };
    pub const KATA3: Agents = Agents {
        kata3: true,
        kata4: false,
    };
    pub const KATA4: Agents = Agents {
        kata3: false,
        kata4: true,
    };

    /// Agents for which `is` returns true.
    pub fn which(is: impl Fn(Agent) -> bool) -> Agents {
        Agents {
            kata3: is(Agent::Kata3),
            kata4: is(Agent::Kata4),
        }
    }

    pub fn has(self, agent: Agent) -> bool {
        match agent {
            Agent::Kata3 => self.kata3,
            Agent::Kata4 => self.kata4,
        }
    }

    pub fn any(self) -> bool {
        self.kata3 || self.kata4
    }

    pub fn and(self, other: Agents) -> Agents {
        Agents {
            kata3: self.kata3 && other.kata3,
            kata4: self.kata4 && other.kata4,
        }
    }

    pub fn names(self) -> &'static str {
        match (self.kata3, self.kata4) {
            (true, true) => "every Kata",
            (true, false) => "Kata <= 3.32",
            (false, true) => "Kata 4",
            (false, false) => "no Kata",
        }
    }
}

/// A kind of defect.
#[derive(Debug, PartialEq, Eq)]
pub struct Rule {
    pub name: &'static str,
    pub severity: Severity,
    pub agents: Agents,
    pub refuses: bool,
    pub breaks: &'static str,
    pub cure: &'static str,
}

macro_rules! rules {
    ($($id:ident $name:literal $severity:ident $agents:ident $refuses:ident, $breaks:expr, $cure:expr;)*) => {
        $(pub static $id: Rule = Rule {
            name: $name, severity: Severity::$severity, agents: Agents::$agents, refuses: rules!($refuses), breaks: $breaks, cure: $cure,
        };)*
        /// Every rule.
        pub static RULES: &[&Rule] = &[$(&$id),*];
    };
    (refuses) => { true };
    (loads) => { false };
}

/// Effect of a refused file, whatever its defect.
const ALL_FAIL: &str =
    "the agent refuses the file, and with it every container that requests any CDI device, at once";

rules! {
    NO_SPEC "no-spec" Error BOTH loads,
        "the agent finds no spec here: containers wait for the kind until agent.cdi_timeout, then fail",
        "give the directory or file that the guest has as /var/run/cdi";
    NOT_READ "not-read" Warning BOTH loads,
        "the agent reads only names that end in .json or .yaml: nothing in this file reaches a container",
        "rename it, unless that is intended";
    UNREADABLE "unreadable" Error BOTH loads,
        "its content is not known",
        "make it readable";
    NOT_A_FILE "not-a-file" Error BOTH loads,
        "the agent opens it like a spec: a link to nothing fails every container, a fifo blocks them",
        "remove it, or give it a name that ends in neither .json nor .yaml";
    DIRECTORY_LOOP "directory-loop" Error BOTH loads,
        "the agent follows links to directories, this one back into itself, and finds every device again and again",
        "remove the link";
    TOO_MANY_FILES "too-many-files" Error BOTH loads,
        "they are not all checked here, and the agent parses every one at every try",
        "give a directory with specs and nothing else";
    TOO_LARGE "too-large" Error BOTH loads,
        "it is not checked here, and costs the agent about 10 ms for 32 kB at every try",
        "list fewer devices, and edits that all devices share once, next to `devices`";
    ALIASES "yaml-aliases" Error BOTH loads,
        "a small file with aliases can take all of the agent's memory: this one is not checked",
        "write out the aliases";
    TOO_MUCH "too-much" Error BOTH loads,
        "agents take time or memory that grows with the square of this: it is not checked here",
        "list fewer devices, and edits that all devices share once, next to `devices`; write JSON";
    NOT_PARSED "not-parsed" Error BOTH refuses,
        ALL_FAIL,
        "write a file under another ending (.tmp) and rename it when it is whole; keep other files elsewhere";
    NOT_A_SPEC "not-a-spec" Error BOTH refuses,
        ALL_FAIL,
        "keep other files elsewhere, or under another ending";
    MISSING_FIELD "missing-field" Error BOTH refuses, ALL_FAIL, "add it";
    WRONG_TYPE "wrong-type" Error BOTH refuses, ALL_FAIL, "give a value of the type that CDI has for it";
    UNKNOWN_FIELD "unknown-field" Error KATA4 refuses,
        "the agent refuses the file, and with it every container that requests any CDI device; earlier ones ignore the field in silence",
        "remove it, or correct its name";
    VERSION_UNKNOWN "version-unknown" Error BOTH refuses, ALL_FAIL, "declare a version that CDI has, the lowest that suffices";
    VERSION_TOO_NEW "version-too-new" Error KATA3 refuses,
        "agents up to 3.32 know no version above 0.7.0: every container that requests any CDI device fails at once",
        "declare a lower version";
    VERSION_TOO_LOW "version-too-low" Error BOTH refuses, ALL_FAIL, "declare a higher version";
    KIND_INVALID "kind-invalid" Error BOTH refuses,
        ALL_FAIL, "write vendor/class in letters, digits, '.', '-' and '_', each starting with a letter and ending in a letter or digit";
    NAME_INVALID "device-name-invalid" Error BOTH refuses,
        ALL_FAIL, "use letters, digits, '.', '-', '_' and ':', with a letter or digit at both ends";
    NAME_TWICE "device-twice" Error BOTH refuses, ALL_FAIL, "give each device of a file a name of its own";
    NO_DEVICES "no-devices" Error KATA4 refuses,
        "the agent refuses the file, and with it every container that requests any CDI device; earlier ones see a kind without devices",
        "list a device, or remove the file";
    WITHOUT_EDITS "device-without-edits" Error KATA4 refuses,
        "the agent refuses the file, and with it every container that requests any CDI device; earlier ones inject nothing in silence",
        "give the device an edit, or omit it";
    IN_TWO_FILES "device-in-two-files" Error BOTH loads,
        "the agent refuses the directory: every container that requests any CDI device fails at once",
        "keep one of the files; replace a spec by rename, under the same name";
    EMPTY_PATH "empty-path" Error BOTH refuses, ALL_FAIL, "give a path";
    ENV_INVALID "env-invalid" Error BOTH refuses, ALL_FAIL, "write NAME=value";
    NODE_TYPE "node-type" Error KATA3 refuses,
        "agents up to 3.32 refuse every node that has a `type`: every container that requests any CDI device fails at once",
        "omit `type`: the agent takes it from the node in the guest";
    NODE_TYPE_INVALID "node-type-invalid" Error KATA4 refuses, ALL_FAIL, "omit `type`, or use b, c, u or p";
    PERMISSIONS "permissions-invalid" Error BOTH refuses, ALL_FAIL, "use a choice of r, w and m";
    HOOK_NAME "hook-name-invalid" Error BOTH refuses, ALL_FAIL, "use createContainer";
    REFUSED "refused" Error BOTH refuses, ALL_FAIL, "correct the fault that the agent's parser names";
    UNRESOLVABLE "unresolvable" Error BOTH loads,
        "no spec lists it: agents from 3.32.0 on fail the container at once, earlier ones after agent.cdi_timeout",
        "request a device that is listed";
    NOT_INJECTED "not-injected" Error BOTH loads,
        "the agent tries again until agent.cdi_timeout, then the container fails",
        "correct the fault that the agent's parser names";
    NOT_RESOLVABLE "not-resolvable" Error BOTH loads,
        "--require-resolvable was given, and a container that requests it now does not start now",
        "publish the device's node, or check again later";
    WAITING "waiting" Note BOTH loads,
        "a container that requests it does not fail: the agent tries again every second, until this path is there or the spec names another one",
        "nothing, unless it stays so; --require-resolvable makes it an error";
    NODE_MISSING "node-missing" Warning BOTH loads,
        "there is no such device node, and without type and major the agent reads it: it tries again every second until agent.cdi_timeout",
        "make the node before the spec";
    NODE_TYPE_DIFFERS "node-type-differs" Error KATA4 loads,
        "the path is of another type than in the spec: the injection fails until agent.cdi_timeout",
        "omit `type`";
    NOT_A_NODE "not-a-device-node" Error BOTH loads,
        "the path is something else than a device node: the injection fails until agent.cdi_timeout",
        "name a device node";
    FILE_MODE_UNSET "file-mode-unset" Warning BOTH loads,
        "the container's node copies the guest node's mode; without a guest node it is 0, and only root can open it",
        "set fileMode, in decimal (438 is 0666)";
    FILE_MODE_ODD "file-mode-odd" Warning BOTH loads,
        "the number is decimal: it means other permissions than its digits",
        "write 438 for 0666, 432 for 0660, 384 for 0600";
    MOUNT_SOURCE "mount-source-missing" Error BOTH loads,
        "the agent cannot mount a missing file: the container fails after its devices were injected",
        "install the file, or omit the mount";
    MOUNT_ORDER "mount-order" Warning BOTH loads,
        "the agent mounts in the order of the list: this mount covers earlier ones below it",
        "list parents before paths below them";
    MOUNT_TWICE "mount-twice" Warning BOTH loads,
        "only the last mount of a container path is made",
        "keep one";
    HOOK_NOT_RUN "hook-not-run" Warning BOTH loads,
        "kata-agent never runs hooks of this name, and logs nothing",
        "use createContainer";
    HOOK_MISSING "hook-missing" Warning BOTH loads,
        "a hook that fails is logged and ignored: the container starts without its effect",
        "install the program, executable, or omit the hook";
    HOOK_ENV_EMPTY "hook-env-empty" Warning BOTH loads,
        "a runtime that hands on its own environment lets an image set LD_PRELOAD for a hook that runs as root (CVE-2025-23266); Kata clears it",
        "give the hook an env of its own, with any content";
    ENV_TWICE "env-twice" Warning BOTH loads, "only the last value of a variable is set", "keep one";
    ENV_SHADOWED "env-shadowed" Warning BOTH loads,
        "an image that sets this variable keeps its own value: programs find the image's first",
        "do not rely on it: mount a file, or write ld.so.cache";
    EDITS_REPEATED "edits-repeated" Warning BOTH loads,
        "edits next to `devices` apply once per file: a container with devices of several files gets hooks, nodes and cgroup rules several times",
        "keep all devices of a kind in one file";
    NO_CONTROL_NODE "no-nvidiactl" Warning BOTH loads,
        "containers start, and nothing in them can use the GPU: the driver's library opens /dev/nvidiactl first",
        "load the driver, and list /dev/nvidiactl next to `devices`";
    NO_UVM_NODE "no-nvidia-uvm" Warning BOTH loads,
        "containers start, and CUDA in them fails: it cannot do without /dev/nvidia-uvm",
        "load nvidia-uvm before the spec is written, and list /dev/nvidia-uvm next to `devices`";
    NOT_BY_INDEX "not-by-index" Warning BOTH loads,
        "Kata requests nvidia.com/gpu=0, =1, ..: none of these names is here",
        "name GPUs by their index in ascending PCI address";
    SLOW "slow-to-parse" Warning BOTH loads,
        "parsing costs the agent about 10 ms for 32 kB, at every try",
        "list edits that all devices share once, next to `devices`, and write JSON without spaces";
}

/// A rule and where it applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub rule: &'static Rule,
    /// Agents of the rule for which the finding is true.
    pub agents: Agents,
    /// Name of the file below the given path; may hold any text.
    pub file: String,
    /// JSON pointer (RFC 6901), empty for the file itself.
    pub pointer: String,
    /// Value at the pointer; may hold any text.
    pub value: Option<String>,
    pub cure: Cow<'static, str>,
}

impl Finding {
    pub fn new(rule: &'static Rule, file: &str, pointer: impl Into<String>) -> Self {
        let (agents, cure) = (rule.agents, Cow::Borrowed(rule.cure));
        Self {
            rule,
            agents,
            file: file.to_string(),
            pointer: pointer.into(),
            value: None,
            cure,
        }
    }

    pub fn value(mut self, value: impl ToString) -> Self {
        self.value = Some(value.to_string());
        self
    }

    pub fn cure(mut self, cure: impl Into<Cow<'static, str>>) -> Self {
        self.cure = cure.into();
        self
    }

    pub fn agents(mut self, agents: Agents) -> Self {
        self.agents = agents;
        self
    }

    /// The value for people: printable and short.
    pub fn shown_value(&self) -> Option<String> {
        self.value.as_deref().map(clipped)
    }

    /// The finding as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "severity": self.rule.severity,
            "rule": self.rule.name,
            "file": self.file,
            "pointer": self.pointer,
            "value": self.value,
            "kata": self.agents.names(),
            "breaks": self.rule.breaks,
            "cure": self.cure,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_has_a_name_of_its_own_and_a_cure() {
        let mut names: Vec<&str> = RULES.iter().map(|r| r.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), RULES.len());
        for rule in RULES {
            assert!(
                !rule.breaks.is_empty() && !rule.cure.is_empty(),
                "{}",
                rule.name
            );
            assert!(
                rule.name
                    .bytes()
                    .all(|b| b.is_ascii_lowercase() || b == b'-' || b.is_ascii_digit()),
                "{}",
                rule.name
            );
            assert!(
                !rule.refuses || rule.severity == Severity::Error,
                "{} is refused and no error",
                rule.name
            );
        }
    }

    #[test]
    fn a_value_is_cut_between_characters_and_printable() {
        let finding =
            Finding::new(&REFUSED, "x", "").value("\u{1b}[2J".to_string() + &"\u{e9}".repeat(200));
        let shown = finding.shown_value().unwrap();
        assert!(
            shown.starts_with("\\x1b[2J\\u{e9}") && shown.ends_with("..."),
            "{shown}"
        );
        assert_eq!(clipped("short"), "short");
    }
}
