#include "tensor/check_gradients_parts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

namespace regather::gradient_check {

// ---- values ---------------------------------------------------------------------------------------------------------

World::World(const std::vector<ParamInfo>& params, std::uint64_t seed) : random(seed) {
  source_.infos = params;
  for (const ParamInfo& info : params) {
    Floats& values = source_.values.emplace_back(static_cast<std::size_t>(info.shape.numel()));
    const bool matrix = info.shape.ndim() > 1;  // so that what it makes is as large as its input
    const float deviation =
        matrix ? 1.0F / std::sqrt(static_cast<float>(std::max<std::int64_t>(1, info.shape.cols()))) : 0.3F;
    draw(values.data(), info.shape.numel(), info.init.kind == Init::Kind::Ones ? 1.0F : 0.0F, deviation);
  }
  view.append(source_);
}

void World::draw(float* out, std::int64_t n, float mean, float deviation) {
  std::normal_distribution<float> normal(mean, deviation);
  for (std::int64_t i = 0; i < n; ++i) out[i] = normal(random);
}

Tensor World::make(const CheckedInput& input) {
  Tensor t(device.memory, input.shape, Tag::Activations, input.dtype);
  if (input.dtype == DType::I32) {
    std::uniform_int_distribution<std::int32_t> uniform(input.low, input.high - 1);
    for (std::int64_t i = 0; i < t.numel(); ++i) t.fresh<std::int32_t>()[i] = uniform(random);
  } else if (!input.values.empty()) {
    return tensor(input.shape, input.values);
  } else {
    draw(t.fresh(), t.numel(), 0, 1);
  }
  return t;
}

Tensor World::tensor(const Shape& shape, const Floats& values) {
  check(static_cast<std::int64_t>(values.size()) == shape.numel(), "check_gradients: {} values for {}", values.size(),
        shape.to_string());
  Tensor t(device.memory, shape, Tag::Activations);
  std::copy(values.begin(), values.end(), t.fresh());
  return t;
}

ParamGradients::ParamGradients(World& world, const std::vector<int>& wanted, float begin_with) : view_(world.view) {
  offsets_.assign(view_.size(), -1);
  std::int64_t elements = 0;
  for (int id : wanted) {
    std::int64_t& offset = offsets_.at(static_cast<std::size_t>(id));
    if (offset >= 0) continue;  // given twice to one operation
    offset = elements;
    elements += view_.info(id).shape.numel();
  }
  unit_.emplace(world.device, offsets_, elements, Tag::Gradients);
  std::fill_n(unit_->flat(), elements, begin_with);
  grads.append(*unit_, static_cast<int>(view_.size()));
}

Floats ParamGradients::of(int param) const {
  const std::int64_t offset = offsets_.at(static_cast<std::size_t>(param));
  if (offset < 0) return {};
  return {unit_->flat() + offset, unit_->flat() + offset + view_.info(param).shape.numel()};
}

void poison(const Buffer& buffer) {
  std::fill_n(buffer.data<float>(), buffer.bytes() / static_cast<std::int64_t>(sizeof(float)),
              std::numeric_limits<float>::quiet_NaN());
}
void poison(Tensor& t) { std::fill_n(t.fresh(), t.numel(), std::numeric_limits<float>::quiet_NaN()); }

Tensor copy(Device& device, const Tensor& t) {
  Tensor c(device.memory, t.shape(), Tag::Activations, t.dtype());
  std::memcpy(c.fresh<void>(), t.data<void>(), static_cast<std::size_t>(t.bytes()));
  return c;
}

std::vector<char> bytes_of(const Tensor& t) {
  const auto* begin = t.data<char>();
  return {begin, begin + t.bytes()};
}

Floats floats_of(const Tensor& t) {
  if (t.dtype() == DType::F32) return {t.data(), t.data() + t.numel()};
  Floats values;  // of tokens: exact below 2^24
  const std::int32_t* from = t.data<std::int32_t>();
  for (std::int64_t i = 0; i < t.numel(); ++i) values.push_back(static_cast<float>(from[i]));
  return values;
}

std::optional<std::size_t> first_difference(const Floats& a, const Floats& b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (std::memcmp(&a[i], &b.at(i), sizeof(float)) != 0) return i;
  return {};
}
std::optional<std::size_t> first_difference(const Tensor& a, const Tensor& b) {
  return first_difference(floats_of(a), floats_of(b));
}

std::optional<std::size_t> first_nan(const Tensor& t) {
  if (t.dtype() != DType::F32) return {};
  for (std::int64_t i = 0; i < t.numel(); ++i)
    if (std::isnan(t.data()[i])) return static_cast<std::size_t>(i);
  return {};
}

double largest_of(const Floats& values) {
  double largest = 0;
  for (float v : values) largest = std::max(largest, std::abs(static_cast<double>(v)));
  return largest;
}

// ---- finite differences ---------------------------------------------------------------------------------------------

// Of a smooth function the differences at two steps agree, and second differences are twice as large at twice the step;
// where there is a kink between, one of the two fails. Along many elements at once their signs are random.
Differences::Slope Differences::along(const Variable& v, const Direction& direction, double step,
                                      const Activations& y0) const {
  constexpr double kRounding = 16 * 0x1p-24;  // of an element of y: its own, and that of the sums it came from
  std::array<double, 2> expected{};
  std::array<std::array<Activations, 2>, 2> y;  // at step and step / 2, on both sides
  for (const std::size_t half : {0U, 1U}) {
    const double h = half == 0 ? step : step / 2;
    Floats before(direction.size());
    for (std::size_t j = 0; j < direction.size(); ++j) before[j] = v.values[direction[j].first];
    for (const std::size_t side : {0U, 1U}) {
      for (std::size_t j = 0; j < direction.size(); ++j) {
        const double by = (side == 0 ? h : -h) * static_cast<double>(direction[j].second);
        float& x = v.values[direction[j].first] = static_cast<float>(static_cast<double>(before[j]) + by);
        const double moved = (static_cast<double>(x) - static_cast<double>(before[j])) * (side == 0 ? 1 : -1);
        expected[half] += static_cast<double>(v.gradient[direction[j].first]) * moved / (2 * h);
      }
      y[half][side] = evaluate();
    }
    for (std::size_t j = 0; j < direction.size(); ++j) v.values[direction[j].first] = before[j];
  }
  Slope slope{(4 * expected[1] - expected[0]) / 3, 0, 0};
  double first = 0, second = 0, first_squares = 0, second_squares = 0, noise_squares = 0;
  for (std::size_t k = 0; k < dy.size(); ++k)
    for (std::int64_t i = 0; dy[k] && i < dy[k].numel(); ++i) {
      const auto at = [&](const Activations& values) { return static_cast<double>(values[k].data()[i]); };
      const double w = static_cast<double>(dy[k].data()[i]), middle = at(y0);
      std::array<double, 2> central{}, bend{};
      for (const std::size_t half : {0U, 1U}) {
        const double h = half == 0 ? step : step / 2, up = at(y[half][0]), down = at(y[half][1]);
        central[half] = w * (up - down) / (2 * h);
        bend[half] = w * (up - 2 * middle + down) / h;
        if (up != down) noise_squares += w * w * (up * up + down * down) / (h * h);
      }
      slope.differences += (4 * central[1] - central[0]) / 3;
      const double f = central[1] - central[0], b = 2 * bend[1] - bend[0];
      first += f;
      second += b;
      first_squares += f * f;
      second_squares += b * b;
    }
  const bool one = direction.size() == 1;
  slope.slack = kRounding * std::sqrt(noise_squares) +
                (one ? std::abs(first) + std::abs(second) : 3 * std::sqrt(first_squares + second_squares));
  return slope;
}

std::string Differences::check(const Variable& v, double& largest_error) const {
  constexpr double kStep = 1.0 / 32, kLeast = 1e-6;
  constexpr int kDirections = 2;
  const std::size_t n = v.gradient.size();
  if (n == 0) return "";
  double squares = 0;
  for (std::size_t i = 0; i < n; ++i) squares += static_cast<double>(v.values[i]) * static_cast<double>(v.values[i]);
  const double root = std::sqrt(squares / static_cast<double>(n)), size = root > 0 ? root : 1;
  const double scale = std::max(largest_of(v.gradient), floor);
  const auto wrong = [&](const Slope& s, double width) {
    const double error = std::abs(s.backward - s.differences);
    if (!std::isfinite(error)) return true;
    if (scale > 0) largest_error = std::max(largest_error, (error - s.slack) / (scale * width));
    return error > s.slack + (options.tolerance * scale + kLeast) * width;
  };
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::shuffle(order.begin(), order.end(), world.random);
  order.resize(std::min(n, static_cast<std::size_t>(std::max(1, options.coordinates))));
  const Activations y0 = evaluate();
  for (const std::size_t i : order)
    if (const Slope s = along(v, {{i, 1.0F}}, kStep * size, y0); wrong(s, 1))
      return fmt::format("element {}: backward says {:.6g}, finite differences {:.6g}", i, s.backward, s.differences);
  for (int d = 0; d < kDirections; ++d) {
    Direction direction;
    for (std::size_t i = 0; i < n; ++i) direction.emplace_back(i, (world.random() & 1U) != 0 ? 1.0F : -1.0F);
    if (const Slope s = along(v, direction, kStep / 4 * size, y0); wrong(s, std::sqrt(static_cast<double>(n))))
      return fmt::format("all elements together: backward says {:.6g}, finite differences {:.6g}", s.backward,
                         s.differences);
  }
  return "";
}

}  // namespace regather::gradient_check
