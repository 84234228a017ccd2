//! Values of the configuration with which no pod gets its GPUs, and those with which some do not.
//! The first are refused, the second noted. `doctor` asks the same questions
//! ([`crate::kata::gpu_needs`]).

use super::checks::Facts;
use super::kernel_params;
use crate::kata::gpu_needs::{CDI_TIMEOUT_S, DEADLINES, Deadline, Limits, Plugging, cdi_timeouts};
use crate::kata::merge::{Effective, Runtime};
use crate::kata::refusal::Refusal;
use crate::kata::version::Configured;
use toml::Value;

/// Facts about the node; the default where nobody looked.
#[derive(Clone, Debug, Default)]
pub struct Node {
    /// GPUs of NVIDIA's.
    pub gpus: usize,
    /// Longest times in seconds of the boots here.
    pub agent: Option<f64>,
    pub boot: Option<f64>,
    pub after_agent: Option<f64>,
}

impl Node {
    fn longest(&self, limits: Limits) -> Option<f64> {
        match limits {
            Limits::Agent => self.agent,
            Limits::Boot => self.boot,
            Limits::Gpus => self.after_agent,
        }
    }
}

fn plugging<'a>(runtime: Runtime, section: &'a str, effective: &'a Effective) -> Plugging<'a> {
    let get = |key| effective.get(&["hypervisor", section, key]);
    let text = |key| get(key).and_then(Value::as_str);
    let ports = get("pcie_root_port").and_then(Value::as_integer);
    Plugging {
        runtime,
        section,
        cold: text("cold_plug_vfio"),
        hot: text("hot_plug_vfio"),
        root_ports: ports.and_then(|n| u64::try_from(n).ok()).unwrap_or(0),
    }
}

/// Values with which no pod gets a GPU.
pub fn refusals(facts: &Facts) -> Vec<Refusal> {
    let plugging = plugging(facts.runtime, &facts.plan.section, facts.before);
    if plugging.is_closed() {
        let key = if plugging.cold.is_some() {
            "cold_plug_vfio"
        } else {
            "hot_plug_vfio"
        };
        let why = "neither cold_plug_vfio nor hot_plug_vfio has a port, so no pod gets a GPU";
        let refusal = facts.refuse_key(key, why);
        return vec![
            refusal
                .cure("set cold_plug_vfio = \"root-port\"")
                .forcible(),
        ];
    }
    if plugging.root_ports == 0 && plugging.lacks_ports(1) {
        let why = "a GPU on a root port finds none, so no pod gets a GPU";
        let refusal = facts.refuse_key("pcie_root_port", why);
        return vec![refusal.cure("set it to the node's GPUs").forcible()];
    }
    Vec::new()
}

/// Values with which some pods fail.
pub fn notes(of: &Configured, after: &Effective, node: &Node) -> Vec<String> {
    let mut notes = Vec::new();
    let plugging = plugging(of.runtime, &of.section, after);
    if plugging.lacks_ports(node.gpus) {
        notes.push(format!(
            "{} = {}, and this node has {} GPUs: a pod with more GPUs than ports fails; set it to \
             {}",
            of.key("pcie_root_port").join("."),
            plugging.root_ports,
            node.gpus,
            node.gpus
        ));
    }
    let mut add = |key: &str, limits: Limits, seconds: f64| {
        let deadline = Deadline {
            limits,
            seconds,
            longest: node.longest(limits),
        };
        if deadline.is_short() {
            notes.push(format!(
                "{key} = {seconds} s gives up on a boot that takes longer{}; raise it",
                deadline.shown_longest()
            ));
        }
    };
    for (key, limits) in DEADLINES {
        let path: Vec<&str> = key.split('.').collect();
        let value = after.get(&path);
        let seconds = value.and_then(|v| v.as_float().or(v.as_integer().map(|n| n as f64)));
        if let Some(seconds) = seconds {
            add(key, limits, seconds);
        }
    }
    let params = after.text(&of.key("kernel_params")).unwrap_or_default();
    add("agent.cdi_timeout", Limits::Gpus, cdi_timeout(params));
    notes
}

/// Seconds that the agent waits for a GPU.
fn cdi_timeout(params: &str) -> f64 {
    let words = kernel_params::words(params).unwrap_or_default();
    let given = cdi_timeouts(words.iter().map(AsRef::as_ref));
    let mut numbers = given.filter_map(|value| value.parse::<u32>().ok());
    numbers.next().map_or(CDI_TIMEOUT_S as f64, f64::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;

    #[test]
    fn what_gives_up_on_some_pods_is_noted_with_the_nodes_own_figures() {
        let dir = temp_dir();
        let path = dir.path().join("configuration.toml");
        let notes = |config: &str, node: Node| {
            std::fs::write(&path, config).unwrap();
            let of = Configured::read(&path).unwrap();
            notes(&of, &of.now(), &node).join("\n")
        };
        let config = "[hypervisor.qemu]\nhot_plug_vfio = \"root-port\"\npcie_root_port = 4\n\
                      [agent.kata]\ndial_timeout = 45\n[runtime]\ncreate_container_timeout = 600";
        let node = || Node {
            gpus: 4,
            boot: Some(90.0),
            after_agent: Some(79.0),
            ..Node::default()
        };
        assert_eq!(
            notes(config, node()),
            "agent.kata.dial_timeout = 45 s gives up on a boot that takes longer; raise it"
        );
        let config = config.replace("45", "60");
        assert_eq!(notes(&config, node()), "");
        let slow = Node {
            gpus: 8,
            boot: Some(599.0),
            after_agent: Some(81.0),
            ..Node::default()
        };
        assert_eq!(
            notes(&config, slow),
            "hypervisor.qemu.pcie_root_port = 4, and this node has 8 GPUs: a pod with more GPUs \
             than ports fails; set it to 8\nruntime.create_container_timeout = 600 s gives up on a \
             boot that takes longer; longest until its GPUs were settled here: 599.0 s; raise it\n\
             agent.cdi_timeout = 100 s gives up on a boot that takes longer; longest from the \
             agent's answer until its GPUs were settled here: 81.0 s; raise it"
        );
        let words = "kernel_params = \"agent.cdi-timeout=5 agent.cdi_timeout=300 \
                     agent.cdi-timeout=5\"\n[agent.kata]";
        let raised = config.replace("[agent.kata]", words);
        assert_eq!(
            notes(
                &raised,
                Node {
                    boot: None,
                    gpus: 0,
                    ..node()
                }
            ),
            ""
        );
    }
}
