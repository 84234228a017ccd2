//! A failure means that a container gets the wrong node of a MIG instance, a display, an IMEX
//! channel or a switch, or that a GPU waits for these devices.

use super::harness::{Booted, Guest, Outcome, TestContext, VmTest, error_has, named};
use anyhow::{Result, ensure};
use kata_gpu_wire::names;
use kata_gpu_wire::record::Kind;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "instances_channels_and_switches_have_nodes_from_the_init",
        run: instances,
    },
    VmTest {
        name: "a_late_display_is_published_and_goes_with_its_gpu",
        run: displays,
    },
    VmTest {
        name: "gpuinit_cdi_complete_holds_the_spec_until_it_has_instances",
        run: complete,
    },
];

/// Minors of a GPU instance's capability and of one of its compute instances': three before them,
/// 15 GPU instances of 8 for each GPU.
fn capabilities(gpu: u32, gi: u32, ci: u32) -> [u32; 2] {
    let instance = 3 + (gpu * 15 + gi) * 9;
    [instance, instance + 1 + ci]
}

/// The nodes of a container, sorted, without those that every container gets.
fn own_nodes(line: &super::harness::AgentLine) -> Vec<String> {
    let common = [
        "/dev/nvidiactl ",
        "/dev/nvidia-uvm ",
        "/dev/nvidia-uvm-tools ",
    ];
    let nodes = line
        .get("nodes")
        .split(',')
        .filter(|n| n.starts_with("/dev/nvidia") && !common.iter().any(|c| n.starts_with(c)));
    let mut nodes: Vec<String> = nodes.map(str::to_string).collect();
    nodes.sort();
    nodes
}

/// Path and mode of each, without the majors, which are the kernel's choice.
fn paths_and_modes(nodes: &[String]) -> Vec<String> {
    let words = |node: &String| node.split(' ').map(str::to_string).collect::<Vec<_>>();
    nodes
        .iter()
        .map(words)
        .map(|w| {
            format!(
                "{} {} {}",
                w[0],
                w[1].split(':').nth(1).unwrap_or("?"),
                w[2]
            )
        })
        .collect()
}

fn instances(context: &TestContext) -> Result<Outcome> {
    // Agents up to 3.31 wait for a name that is not there yet: an instance's name is known when its
    // GPU is up.
    let asked = "testagent.containers=plain:1;first:1:0;last:1:3;\
        channel:nvidia.com/imex-channel=1;all:nvidia.com/nvswitch=all";
    let booted = Guest::with(&format!(
        "fakepci.gpus=3 nvidia.mig=1:2:2 nvidia.switches=2 gpuinit.imex=2 \
        nvidia.displays=2 nvidia.displays_ms=1000 testagent.version=3.31.0 {asked}"
    ))
    // The kernel announces the display when its GPU has been usable for a while: this worker adds
    // it to the spec.
    .script("settled>spec-has:renderD130+kill;settled>spec")
    .boot(context, "mig")?;
    let last = booted.created("last")?;
    let [gi, ci] = capabilities(1, 2, 1);
    let expected = [
        format!("/dev/nvidia-caps/nvidia-cap{gi} {gi} 444"),
        format!("/dev/nvidia-caps/nvidia-cap{ci} {ci} 444"),
    ];
    let is = paths_and_modes(&own_nodes(&last));
    ensure!(
        is == [&expected[..], &["/dev/nvidia1 1 666".into()]].concat(),
        "{is:?}"
    );
    let [gi, ci] = capabilities(1, 1, 0);
    let is = paths_and_modes(&own_nodes(&booted.created("first")?));
    ensure!(
        is[..2]
            == [
                format!("/dev/nvidia-caps/nvidia-cap{gi} {gi} 444"),
                format!("/dev/nvidia-caps/nvidia-cap{ci} {ci} 444")
            ],
        "{is:?}"
    );
    let is = paths_and_modes(&own_nodes(&booted.created("channel")?));
    ensure!(
        is == ["/dev/nvidia-caps-imex-channels/channel1 1 666"],
        "{is:?}"
    );
    let is = paths_and_modes(&own_nodes(&booted.created("all")?));
    ensure!(
        is == [
            "/dev/nvidia-nvswitch0 0 666",
            "/dev/nvidia-nvswitch1 1 666",
            "/dev/nvidia-nvswitchctl 255 666"
        ],
        "{is:?}"
    );
    // The GPU itself did not wait for any of it.
    booted.created("plain")?;
    let of = |name: &str| {
        booted.record(name, |r| {
            r.name == name && r.fields.get("index") == Some(&1.into())
        })
    };
    let (published, beside) = (of(names::GPU_PUBLISHED)?, of(names::CDI_EXTRA_DEVICES)?);
    ensure!(
        beside.fields["instances"] == 4 && beside.fields["displays"] == 0,
        "{beside:?}"
    );
    ensure!(
        published.seq < of(names::GPU_USABLE)?.seq,
        "GPU 1 waited for its instances"
    );
    // A worker that takes over publishes all of it again.
    let text = spec(&booted, "nvidia.yaml", |text| text.contains("\"1:3\""))?;
    ensure!(
        ["\"1:0\"", "\"1:1\"", "\"1:2\""]
            .iter()
            .all(|name| text.contains(name))
            && !text.contains("\"0:0\""),
        "{text}"
    );
    spec(&booted, "nvidia-imex.yaml", |text| {
        text.contains("channel0") && text.contains("channel1")
    })?;
    ensure!(
        booted
            .records()
            .iter()
            .any(|r| r.name == names::PROCESS_DIED),
        "the worker was not killed"
    );
    Ok(Outcome::Passed)
}

/// The text of a spec as the guest's script has reported it.
fn spec(booted: &Booted, file: &str, wanted: impl Fn(&str) -> bool) -> Result<String> {
    let line = booted.agent("spec", |l| l.get("file") == file && wanted(l.get("text")))?;
    Ok(line.get("text").to_string())
}

fn displays(context: &TestContext) -> Result<Outcome> {
    // The GPU is taken out once both nodes are there.
    let steps =
        "settled>spec-has:renderD129+spec+remove:1;gpu.removed/1>sleep:0;cdi.publish!end>spec";
    let booted = Guest::with("fakepci.gpus=2 nvidia.displays=1 nvidia.displays_ms=500")
        .script(steps)
        .boot(context, "displays")?;
    let text = spec(&booted, "nvidia.yaml", |text| {
        text.contains("/dev/dri/card1") && text.contains("/dev/dri/renderD129")
    })?;
    for link in [
        "../card1::/dev/dri/by-path/pci-0001:00:01.0-card",
        "../renderD129::/dev/dri/by-path/pci-0001:00:01.0-render",
    ] {
        ensure!(text.matches(link).count() == 2, "{link}: {text}");
    }
    // The display came after the GPU was usable, announced by the kernel alone.
    let of = |name: &str| {
        booted.record(name, |r| {
            r.name == name && r.fields.get("index") == Some(&1.into())
        })
    };
    ensure!(
        of(names::CDI_EXTRA_DEVICES)?.seq > of(names::GPU_USABLE)?.seq,
        "no display was waited for"
    );
    spec(&booted, "nvidia.yaml", |text| {
        !text.contains("dri/") && !text.contains("\"1\"")
    })?;
    ensure!(
        !booted
            .lines()
            .iter()
            .any(|l| l.get("msg") == "script" && !l.get("error").is_empty()),
        "a step of the script failed"
    );
    Ok(Outcome::Passed)
}

fn complete(context: &TestContext) -> Result<Outcome> {
    // This agent fails at once on a name that a present kind does not list. Of channels there is no
    // spec: their number is out of bounds. The timeout leaves a busy machine time for the instance.
    let booted = Guest::with(
        "fakepci.gpus=2 nvidia.mig=0:1:1 gpuinit.cdi=complete gpuinit.imex=4096 \
        agent.cdi_timeout=60 testagent.containers=instance:0:0;channel:nvidia.com/imex-channel=0",
    )
    .boot(context, "complete")?;
    let is = own_nodes(&booted.created("instance")?);
    ensure!(is.len() == 3, "{is:?}");
    let records = booted.records();
    let published = named(&records, Kind::Begin, names::CDI_PUBLISH);
    ensure!(published.len() == 1, "{published:?}");
    let reported = booted.record("config", |r| {
        r.name == names::CONFIG && r.fields.get("parameter") == Some(&"gpuinit.imex".into())
    })?;
    error_has(&reported, &["0 to 2048"])?;
    let channel = booted.refused("channel")?;
    ensure!(channel.get("error").contains("CDI timeout"), "{channel:?}");
    Ok(Outcome::Passed)
}
