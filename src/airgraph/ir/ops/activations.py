"""Activations and their gradients."""

from __future__ import annotations

from airgraph.ir.ops.joint import each, first_given, sized
from airgraph.ir.ops.rules import like
from airgraph.ir.ops.table import REQUIRED, define

define("Elu", "x", like(), alpha=1.0, scale=1.0, input_scale=1.0)
define("EluGradV2", "grads activations", like("grads"), alpha=1.0, scale=1.0, input_scale=1.0, is_result=False)
define("CeluV2", "x", like(), alpha=1.0)
define("GLU", "x", sized(), dim=-1)
define("GLUGrad", "y_grad x", like("x"), dim=-1)
define("HardSwish", "x", like())
define("HardSwishGrad", "grad x", like("grad"))
define("HardSigmoid", "input_x", like("input_x"))
define("HardSigmoidGrad", "grads input_x", like("grads"))
define("HardtanhGrad", "result grad", like("grad"), min_val=-1.0, max_val=1.0)
define("Mish", "x", like())
define("MishGrad", "grad x", like("grad"))
define("LogSigmoid", "x", each(like(), sized()), outputs="y buffer")
define("LogSigmoidGrad", "grads features buffer", like("grads"))
define("PRelu", "x weight", like())
define("PReluGrad", "grads features weights", each(like("features"), first_given("weights")), outputs="dx da")
define("LeakyReluGrad", "gradients features", like("gradients"), negative_slope=0.0, self_is_result=False)
define("SiluGrad", "dy x", like("dy"))
define("SoftplusV2", "x", like(), beta=1.0, threshold=20.0)
define("SoftplusV2Grad", "input_gradients input_features", like("input_gradients"), beta=1.0, threshold=20.0)
define("SoftShrinkGrad", "input_grad input_x", like("input_grad"), lambd=0.5)
define("HardShrinkGrad", "gradients features", like("gradients"), lambd=0.5)
define("ThresholdV2", "x threshold value", like())
define("Swish", "x", like(), scale=1.0)
define("Gelu", "x", like(), approximate="none")
define("LeakyRelu", "x", like(), negative_slope=0.0)
define("ReluGrad", "gradients features", like("gradients"))
define("ThresholdGradV2D", "gradients features", like("gradients"), threshold=REQUIRED)
define("SigmoidGrad", "y dy", like("y"))
define("TanhGrad", "y dy", like("y"))
define("GeluGrad", "dy x y", like("dy"), approximate="none")
